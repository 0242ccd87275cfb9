"""The interface of a model to the blend pass: layers that can be run one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from cacheblend_rag.blend.cost import LayerCost
from cacheblend_rag.blend.rotary import Rotation
from cacheblend_rag.errors import UnsupportedModelError


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """The inputs of one layer's attention, after its own projections, norms and rotary.

    query: (batch, heads, rows, head_dim). key, value: (batch, kv_heads, rows, head_dim), of the
    rows only. scaling: factor on query x key. window: sliding window in tokens, itself included,
    or None. softcap: logits are capped at softcap * tanh(logits / softcap), or None. sinks:
    (heads,), each head's attention sink as a logit, or None.
    """

    layer: int
    query: Tensor
    key: Tensor
    value: Tensor
    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None

    def part(self, start: int, stop: int) -> AttentionCall:
        """Return the call for the rows with indices ``start`` to ``stop`` - 1."""
        own = {name: getattr(self, name)[:, :, start:stop] for name in ("query", "key", "value")}
        return replace(self, **own)


Attend = Callable[[AttentionCall], Tensor]
"""Computes attention for a call; returns (batch, rows, heads, head_dim)."""


Reduction = Literal["sum", "max"]
"""How the ranks' parts of a value are combined."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """Shape, dtype and device of a model's KV on this rank."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    def fits(self, shape: Sequence[int], dtype: torch.dtype, tokens: int) -> bool:
        """Whether KV of this shape and dtype fits this model and so many tokens."""
        wanted = (self.layers, self.kv_heads, tokens, self.head_dim)
        return tuple(shape) == wanted and dtype == self.dtype


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of a module or object temporarily.

    Afterwards the object has what it had itself before, such as another library's hook, or nothing.
    """
    own = vars(owner)  # written to itself: nn.Module's setattr is slow
    before = {name: own[name]} if name in own else {}
    own[name] = value
    try:
        yield
    finally:
        own.pop(name, None)
        own |= before


@contextmanager
def forwards_replaced(
    layers: Sequence[Any], made: Callable[[int], Callable[..., Any]]
) -> Iterator[None]:
    """Replace layers' forward functions temporarily, each by what is made for its index."""
    with ExitStack() as restore:
        for index, layer in enumerate(layers):
            restore.enter_context(replaced(layer, "forward", made(index)))
        yield


class RecordedError(Exception):
    """Raised out of a layer of a recording pass: nothing after it is needed."""


class DecoderStack(Protocol):
    """A decoder whose layers can be run one at a time, with attention intercepted.

    Nothing else of a layer is replaced: norms, projections, biases, rotary, experts and residuals
    are the model's own, so no per-model code is needed.

    Tensor-parallel ranks must call its collective operations in the same order, or they wait
    forever.
    """

    @property
    def geometry(self) -> Geometry: ...

    @property
    def costs(self) -> tuple[LayerCost, ...]:
        """Work of each layer."""

    @property
    def row_block(self) -> int:
        """Most rows run through a layer at once, which bounds the memory that they take."""

    def embed(self, token_ids: Tensor) -> Tensor:
        """Return hidden states (batch, rows, hidden) of ``token_ids`` (batch, rows)."""

    def position_inputs(self, positions: Tensor) -> Any:
        """Return the layers' inputs for ``positions`` (batch, rows), such as cos and sin."""

    def run_layer(self, layer: int, hidden: Tensor, position_inputs: Any, attend: Attend) -> Tensor:
        """Run one whole layer on ``hidden`` (batch, rows, hidden); errors of ``attend`` propagate.

        ``hidden`` is not changed, even if the model's own layers work in place.
        """

    def rotation(self, offset: int) -> Rotation:
        """Return the rotation that moves the keys of all layers by ``offset`` positions.

        It leaves out the magnitude by which some rotary schemes (YaRN) scale keys: cached keys
        are scaled already. Raises IndexError if ``offset`` is outside the model's range.
        """

    def all_reduce(self, part: Tensor, how: Reduction) -> Tensor:
        """Return all ranks' parts combined, the same on each rank; ``part`` on a single rank."""

    def broadcast(self, part: Tensor) -> Tensor:
        """Return the first rank's ``part`` on all ranks."""


class NoAttentionError(UnsupportedModelError):
    """A layer was run and never called attention."""


class _ProbedError(Exception):
    """Raised out of attention to stop a layer once its query, key and value are known."""

    def __init__(self, call: AttentionCall) -> None:
        self.call = call


def probe_layer(
    stack: DecoderStack, layer: int, hidden: Tensor, position_inputs: Any
) -> AttentionCall:
    """Run a layer up to attention, and return the inputs of attention.

    Raises NoAttentionError when the layer never calls attention.
    """

    def stop(call: AttentionCall) -> Tensor:
        raise _ProbedError(call)

    try:
        stack.run_layer(layer, hidden, position_inputs, stop)
    except _ProbedError as probed:
        return probed.call
    raise NoAttentionError(f"layer {layer} never calls attention")


def on_all_ranks(stack: DecoderStack, held: Sequence[bool]) -> list[bool]:
    """Return for each item whether all ranks hold it, given whether this rank does."""
    lacking = torch.tensor([not has for has in held], dtype=torch.int32)
    return [not lacks for lacks in stack.all_reduce(lacking, "max").tolist()]
