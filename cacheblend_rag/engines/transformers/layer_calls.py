"""How a Hugging Face model calls its decoder layers, recorded from the model itself.

In a recording pass other functions replace the layers and record their inputs: embeddings, rotary
tables, and masks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from cacheblend_rag.blend.stack import replaced
from cacheblend_rag.engines.transformers.interception import DRIVEN, Interception
from cacheblend_rag.errors import UnsupportedModelError


class _RecordedError(Exception):
    """Raised out of a layer of a recording pass: nothing after it is needed."""


class LayerCalls:
    """The inputs that a model passes to its decoder layers.

    decoder: the part of the model that calls the layers. layers: in order.

    Raises UnsupportedModelError when the model has no list of decoder layers.
    """

    def __init__(self, model: PreTrainedModel, interception: Interception) -> None:
        self.decoder, self.layers = _decoder(model)
        self._model_type, self._interception = type(model).__name__, interception
        signatures = [inspect.signature(type(layer).forward) for layer in self.layers]
        self._names = [_positional(signature) for signature in signatures]

    def embed(self, token_ids: Tensor) -> Tensor:
        """Return the input of the first layer for tokens (batch, rows)."""
        recorded: list[Tensor] = []

        def first(hidden: Tensor, *_: Any, **__: Any) -> Tensor:
            recorded.append(hidden)
            raise _RecordedError

        with self.replaced({0: self._by_name(0, first)}):
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
                raise _RecordedError
            return hidden

        with self.replaced({i: self._by_name(i, record) for i in range(len(self.layers))}):
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

    @contextmanager
    def replaced(self, functions: dict[int, Callable[..., Any]]) -> Iterator[None]:
        """Replace some layers' forward functions temporarily."""
        with ExitStack() as restore:
            for layer, function in functions.items():
                restore.enter_context(replaced(self.layers[layer], "forward", function))
            yield

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
        with self._interception.implementation(implementation):
            try:
                self.decoder(**inputs, use_cache=False)
            except _RecordedError:
                return
        raise UnsupportedModelError(
            f"{self._model_type} does not call its {len(self.layers)} layers in order"
        )


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
