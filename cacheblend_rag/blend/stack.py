"""DecoderStack: the few things a model must offer so that the blend pass can drive it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from cacheblend_rag.blend.cost import LayerCost
from cacheblend_rag.blend.rotary import Rotation
from cacheblend_rag.errors import UnsupportedModelError


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What one layer hands to attention, after its own projections, norms and rotary.

    query: (batch, heads, rows, head_dim). key, value: (batch, kv_heads, rows, head_dim), of the
    rows only. scaling: factor on query x key. window: sliding window in tokens, itself included,
    or None. softcap: logits are capped at softcap * tanh(logits / softcap), or None. sinks:
    (heads,), a logit of each head that takes its share of attention and gives nothing, or None.
    """

    layer: int
    query: Tensor
    key: Tensor
    value: Tensor
    scaling: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


Attend = Callable[[AttentionCall], Tensor]
"""Computes attention for a call; returns (batch, rows, heads, head_dim)."""


Reduction = Literal["sum", "max"]
"""How the parts that ranks have of a value become one."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """Shapes and types of a model's KV, as far as this rank holds it."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    def fits(self, shape: Sequence[int], dtype: torch.dtype, tokens: int) -> bool:
        """Whether KV of this shape and type is this model's, and of so many tokens."""
        wanted = (self.layers, self.kv_heads, tokens, self.head_dim)
        return tuple(shape) == wanted and dtype == self.dtype


class DecoderStack(Protocol):
    """A decoder whose layers can be run one at a time, with attention intercepted.

    Nothing else of a layer is replaced: norms, projections, biases, rotary, experts and residuals
    are the model's own, so no per-model code is needed.

    Ranks that share the model's heads must all ask each other alike and in the same order, or they
    wait forever.
    """

    @property
    def geometry(self) -> Geometry: ...

    @property
    def costs(self) -> tuple[LayerCost, ...]:
        """Work of each layer."""

    @property
    def row_block(self) -> int:
        """Most rows run through a layer at once."""

    def embed(self, token_ids: Tensor) -> Tensor:
        """Return hidden states (batch, rows, hidden) of ``token_ids`` (batch, rows)."""

    def position_inputs(self, positions: Tensor) -> Any:
        """Return what the layers need to know of ``positions`` (batch, rows); opaque."""

    def run_layer(self, layer: int, hidden: Tensor, position_inputs: Any, attend: Attend) -> Tensor:
        """Run one whole layer on ``hidden`` (batch, rows, hidden); what ``attend`` raises passes.

        ``hidden`` stays as it is, also where the model's own layers work in place.
        """

    def rotation(self, offset: int) -> Rotation:
        """Return what moves the keys of all layers by ``offset`` positions.

        The magnitude some rotary schemes put on keys (YaRN) is divided out: a cached key has it.
        """

    def all_reduce(self, part: Tensor, how: Reduction) -> Tensor:
        """Return all ranks' parts as one, the same for each of them; ``part`` when alone."""

    def broadcast(self, part: Tensor) -> Tensor:
        """Return the first rank's ``part`` on all ranks."""


class NoAttentionError(UnsupportedModelError):
    """A layer was run and never came to attention."""


class _ProbedError(Exception):
    """Raised out of attention to stop a layer once its query, key and value are known."""

    def __init__(self, call: AttentionCall) -> None:
        self.call = call


def probe_layer(
    stack: DecoderStack, layer: int, hidden: Tensor, position_inputs: Any
) -> AttentionCall:
    """Return what a layer would hand to attention, and stop there.

    Raises NoAttentionError when the layer never comes to attention.
    """

    def stop(call: AttentionCall) -> Tensor:
        raise _ProbedError(call)

    try:
        stack.run_layer(layer, hidden, position_inputs, stop)
    except _ProbedError as probed:
        return probed.call
    raise NoAttentionError(f"layer {layer} never calls attention")


def on_all_ranks(stack: DecoderStack, held: Sequence[bool]) -> list[bool]:
    """Return which of some things every rank holds, given which of them this one does."""
    lacking = torch.tensor([not has for has in held], dtype=torch.int32)
    return [not lacks for lacks in stack.all_reduce(lacking, "max").tolist()]
