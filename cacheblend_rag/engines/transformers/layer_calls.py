"""Calls a Hugging Face model's layers as the model does, and intercepts their attention.

An attention implementation is registered under our own name and activated, through the model's own
configs, only while a layer or the model runs. No model class is named.

Some families pass their sliding window to attention as a number, some only through the mask.
PyTorch's attention uses the mask, so each layer's mask function is evaluated at large positions,
without building a mask.

In a recording pass other functions replace the layers and record their inputs: embeddings, rotary
tables, and masks.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from cacheblend_rag.blend.stack import Attend, AttentionCall, RecordedError, forwards_replaced
from cacheblend_rag.errors import UnsupportedModelError
from cacheblend_rag.reason import ReasonCode

DRIVEN = "cacheblend_rag"
"""Active while layers are run or recorded; no masks are built."""
SIGHT = "cacheblend_rag_sight"
"""Active while the layers' masks are recorded."""
ASKED_ROWS = (5_003, 77_777, 1_048_573)
"""Positions that are no multiples of usual block sizes, so that block-wise masks show there."""
ACTIVE = "_attn_implementation_internal"
"""The attribute of a config that names the attention implementation."""

_active = threading.local()


def _intercepted(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The registered attention function: passes the call to this thread's runner of the layers."""
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer, window = next(_active.calls)
    call = AttentionCall(layer, query, key, value, scaling, window, softcap, s_aux)
    return _active.attend(call), None


class AttentionWindow:
    """The attention mask of one layer, as a function of positions.

    sees: (batch, head, row, key) -> whether the row may see the key, all of them indices.
    """

    def __init__(self, sees: Callable[..., Any], device: torch.device) -> None:
        self._sees, self._device = sees, device

    def window(self, layer: int) -> int | None:
        """Return how many keys a row sees at most, itself included; None is without limit.

        Raises UnsupportedModelError when that is not all there is to it; ``layer`` names the layer.
        """
        counts = [self._count(layer, row) for row in ASKED_ROWS]
        if counts == [row + 1 for row in ASKED_ROWS]:
            return None
        if all(
            count == min(counts[-1], row + 1) for count, row in zip(counts, ASKED_ROWS, strict=True)
        ):
            return counts[-1]
        raise _unsupported(f"layer {layer} attends in blocks, not causally in a window")

    def _count(self, layer: int, row: int) -> int:
        """Return how many keys a row sees, which must end with its own."""
        keys = torch.arange(row + 2, device=self._device)
        zero, asked = keys[:1], keys[row : row + 1]
        seen = torch.as_tensor(self._sees(zero, zero, asked, keys)).expand(row + 2)
        count = int(seen.sum())
        if bool(seen[row + 1]):
            raise _unsupported(f"layer {layer} attends to later tokens")
        if not bool(seen[row + 1 - count : row + 1].all()):
            raise _unsupported(f"layer {layer} does not attend to a run of tokens")
        return count


def _unsupported(why: str) -> UnsupportedModelError:
    return UnsupportedModelError(why, ReasonCode.UNSUPPORTED_ATTENTION)


def record_sight(
    *_: Any, mask_function: Callable[..., Any], device: torch.device, **__: Any
) -> AttentionWindow:
    """The registered mask function."""
    return AttentionWindow(mask_function, device)


AttentionInterface.register(DRIVEN, _intercepted)
AttentionInterface.register(SIGHT, _intercepted)
AttentionMaskInterface.register(SIGHT, record_sight)


class LayerCalls:
    """How a model calls its decoder's layers, and its layers attention; both can be intercepted.

    It patches the model meanwhile, so only the thread that runs the model may use it.

    decoder: the part of the model that calls the layers. layers: in order.

    Raises UnsupportedModelError when the model has no list of decoder layers.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.decoder, self.layers = _decoder(model)
        self._model_type = type(model).__name__
        signatures = [inspect.signature(type(layer).forward) for layer in self.layers]
        self._names = [_positional(signature) for signature in signatures]
        configs = {id(own): own for part in model.modules() if (own := _own_config(part))}
        self._configs = list(configs.values())

    @property
    def replaces_flash(self) -> bool:
        """Whether the model's own attention is a kernel that takes no mask."""
        return any("flash" in str(config[ACTIVE]) for config in self._configs)

    @contextmanager
    def attending(self, calls: Iterable[tuple[int, int | None]], attend: Attend) -> Iterator[None]:
        """Let attention use ``attend``, on this thread.

        calls: the layer and its window, of each call of attention in turn.
        """
        _active.calls, _active.attend = iter(calls), attend
        try:
            with self.implementation(DRIVEN):
                yield
        finally:
            del _active.calls, _active.attend

    @contextmanager
    def implementation(self, name: str) -> Iterator[None]:
        """Activate one of our attention implementations."""
        before = [config[ACTIVE] for config in self._configs]
        try:
            for config in self._configs:
                config[ACTIVE] = name
            yield
        finally:
            for config, own in zip(self._configs, before, strict=True):
                config[ACTIVE] = own

    def embed(self, token_ids: Tensor) -> Tensor:
        """Return the input of the first layer for tokens (batch, rows)."""
        recorded: list[Tensor] = []

        def first(hidden: Tensor, *_: Any, **__: Any) -> Tensor:
            recorded.append(hidden)
            raise RecordedError

        with forwards_replaced(self.layers[:1], lambda layer: self._by_name(layer, first)):
            self._record(DRIVEN, input_ids=token_ids, position_ids=torch.zeros_like(token_ids))
        return recorded[0]

    def arguments(
        self, positions: Tensor, blank: Tensor, implementation: str = DRIVEN
    ) -> list[dict[str, Any]]:
        """Return the arguments of each layer for tokens at ``positions`` (batch, rows).

        blank: hidden states to begin with, (1, 1, hidden). implementation: the active attention.
        """
        recorded: list[dict[str, Any]] = []

        def record(hidden: Tensor, **arguments: Any) -> Tensor:
            recorded.append(arguments)
            if len(recorded) == len(self.layers):
                raise RecordedError
            return hidden

        with forwards_replaced(self.layers, lambda layer: self._by_name(layer, record)):
            self._record(
                implementation,
                inputs_embeds=blank.expand(*positions.shape, -1),
                position_ids=positions,
            )
        if implementation == DRIVEN:
            for arguments in recorded:
                arguments |= dict.fromkeys(arguments.keys() & {"attention_mask", "past_key_values"})
        return recorded

    def hidden_in(self, layer: int, given: tuple[Any, ...], named: dict[str, Any]) -> Tensor:
        """Return the hidden states among a layer's arguments."""
        return cast(Tensor, given[0] if given else named[self._names[layer][0]])

    def _by_name(self, layer: int, function: Callable[..., Tensor]) -> Callable[..., Any]:
        """Return a forward that passes ``function`` the hidden state, and the rest by name."""
        first, *rest = self._names[layer]

        def forward(*given: Any, **named: Any) -> Any:
            if not given:
                return function(named.pop(first), **named)
            hidden, *others = given
            return function(hidden, **dict(zip(rest, others, strict=False)), **named)

        return forward

    def _record(self, implementation: str, **inputs: Tensor) -> None:
        with self.implementation(implementation):
            try:
                self.decoder(**inputs, use_cache=False)
            except RecordedError:
                return
        raise UnsupportedModelError(
            f"{self._model_type} does not call its {len(self.layers)} layers in order"
        )


def _own_config(module: nn.Module) -> dict[str, Any] | None:
    """Return the attributes of a module's config, if it names an attention implementation.

    As a dict: a config's own getattr and setattr are slow, and each layer that is run needs them.
    """
    attributes = getattr(getattr(module, "config", None), "__dict__", {})
    return attributes if ACTIVE in attributes else None


def _positional(signature: inspect.Signature) -> list[str]:
    """Return the names of a layer's parameters that may be given by position, without ``self``."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [name for name, one in signature.parameters.items() if one.kind in kinds][1:]


def _decoder(model: PreTrainedModel) -> tuple[nn.Module, list[nn.Module]]:
    """Return the part of a model that calls the decoder's layers, and the layers in order."""
    count = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    for part in (model.get_decoder(), model.base_model):
        for module in part.modules():
            for name, child in module.named_children():
                if isinstance(child, nn.ModuleList) and (len(child) == count or name == "layers"):
                    return part, list(child)
    raise UnsupportedModelError(f"{type(model).__name__} has no list of decoder layers")
