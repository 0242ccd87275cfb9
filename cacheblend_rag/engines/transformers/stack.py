"""TransformersStack: any Hugging Face decoder, driven layer by layer, with attention intercepted.

No layer is rewritten and no model class is named. Two things make that possible: an attention
implementation registered under our own name, in force only while a layer is being driven, and a
recording pass in which the model itself says what it hands each layer (embeddings, rotary tables).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from cacheblend_rag.blend.cost import LayerCost
from cacheblend_rag.blend.stack import Agreement, Attend, AttentionCall, Geometry

IMPLEMENTATION = "cacheblend_rag"
_active = threading.local()


def _intercepted(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The registered attention: hands the call to whoever drives the layer on this thread."""
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    call = AttentionCall(_active.layer, query, key, value, scaling, sliding_window, softcap)
    return _active.attend(call), None


AttentionInterface.register(IMPLEMENTATION, _intercepted)


class _ProbedError(Exception):
    """Raised out of attention to stop a layer once its query, key and value are known."""

    def __init__(self, call: AttentionCall) -> None:
        self.call = call


class _RecordedError(Exception):
    """Raised out of the last layer of a recording pass: nothing after it is needed."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Keyword arguments of each layer for some positions, as the model itself would pass them."""

    arguments: tuple[dict[str, Any], ...]


class TransformersStack:
    """A DecoderStack over a Hugging Face causal language model.

    The model must not be used by others while a method runs; the engine's lock sees to that.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.layers: list[nn.Module] = list(model.get_decoder().layers)
        self._configs = _attention_configs(model)
        config = model.config.get_text_config()
        heads = int(config.num_attention_heads)
        weight = next(model.parameters())
        self._geometry = Geometry(
            layers=len(self.layers),
            heads=heads,
            kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
            head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
            dtype=weight.dtype,
            device=weight.device,
        )
        self._hidden_size = int(config.hidden_size)
        self._costs: tuple[LayerCost, ...] | None = None

    @property
    def geometry(self) -> Geometry:
        return self._geometry

    @property
    def costs(self) -> tuple[LayerCost, ...]:
        if self._costs is None:
            self._costs = tuple(self._cost(layer) for layer in range(len(self.layers)))
        return self._costs

    def embed(self, token_ids: Tensor) -> Tensor:
        recorded: list[Tensor] = []

        def first(hidden: Tensor, *_: Any, **__: Any) -> Tensor:
            recorded.append(hidden)
            raise _RecordedError

        with self._replaced({0: first}):
            self._record(input_ids=token_ids, position_ids=torch.zeros_like(token_ids))
        return recorded[0]

    def at(self, positions: Tensor) -> _Place:
        return _Place(tuple(self._layer_arguments(positions, self._geometry.dtype)))

    def run_layer(self, layer: int, hidden: Tensor, place: _Place, attend: Attend) -> Tensor:
        with self._intercepting(layer, attend):
            out = self.layers[layer](hidden, **place.arguments[layer])
        return cast(Tensor, out[0] if isinstance(out, tuple) else out)

    def probe_layer(self, layer: int, hidden: Tensor, place: _Place) -> AttentionCall:
        def stop(call: AttentionCall) -> Tensor:
            raise _ProbedError(call)

        try:
            self.run_layer(layer, hidden, place, stop)
        except _ProbedError as probed:
            return probed.call
        raise RuntimeError(f"layer {layer} of {type(self.model).__name__} never called attention")

    def rotation(self, offset: int) -> tuple[Tensor, Tensor]:
        position = torch.tensor([[offset]], device=self._geometry.device)
        tables = [
            arguments["position_embeddings"]
            for arguments in self._layer_arguments(position, torch.float32)
        ]
        cos = torch.stack([cos.reshape(-1) for cos, _ in tables]).float()
        sin = torch.stack([sin.reshape(-1) for _, sin in tables]).float()
        magnitude = (cos.square() + sin.square()).sqrt()
        return cos / magnitude, sin / magnitude

    def across_ranks(self, part: Tensor, how: Agreement) -> Tensor:
        return part

    def logits(self, hidden: Tensor) -> Tensor:
        """Return (batch, vocabulary) float32 logits of final hidden states (batch, 1, hidden)."""

        def last(*_: Any, **__: Any) -> Tensor:
            return hidden

        blank = torch.zeros(hidden.shape[:2], dtype=torch.long, device=hidden.device)
        functions: dict[int, Callable[..., Tensor]] = dict.fromkeys(
            range(len(self.layers)), _identity
        )
        functions[len(self.layers) - 1] = last
        with self._replaced(functions), self._implementation():
            out = self.model(input_ids=blank, position_ids=blank, use_cache=False, logits_to_keep=1)
        return cast(Tensor, out.logits[:, -1].float())

    def _layer_arguments(self, positions: Tensor, dtype: torch.dtype) -> list[dict[str, Any]]:
        """What the model passes each layer for tokens at ``positions`` (batch, rows)."""
        recorded: list[dict[str, Any]] = []

        def record(hidden: Tensor, *_: Any, **arguments: Any) -> Tensor:
            recorded.append({**arguments, "attention_mask": None, "past_key_values": None})
            if len(recorded) == len(self.layers):
                raise _RecordedError
            return hidden

        blank = torch.zeros(1, 1, 1, dtype=dtype, device=self._geometry.device)
        with self._replaced(dict.fromkeys(range(len(self.layers)), record)):
            self._record(
                inputs_embeds=blank.expand(*positions.shape, self._hidden_size),
                position_ids=positions,
            )
        return recorded

    def _record(self, **inputs: Tensor) -> None:
        with self._implementation():
            try:
                self.model.get_decoder()(**inputs, use_cache=False)
            except _RecordedError:
                return
        raise RuntimeError(f"{type(self.model).__name__} did not call its decoder layers in order")

    @contextmanager
    def _replaced(self, functions: dict[int, Callable[..., Tensor]]) -> Iterator[None]:
        """Let some layers' forward be other functions for a while."""
        with ExitStack() as restore:
            for layer, function in functions.items():
                module = self.layers[layer]
                module.forward = function
                restore.callback(module.__dict__.pop, "forward")
            yield

    @contextmanager
    def _intercepting(self, layer: int, attend: Attend) -> Iterator[None]:
        _active.layer, _active.attend = layer, attend
        try:
            with self._implementation():
                yield
        finally:
            del _active.layer, _active.attend

    @contextmanager
    def _implementation(self) -> Iterator[None]:
        """Put our attention implementation in force; it has no masks, so none are built."""
        before = [config._attn_implementation for config in self._configs]
        try:
            for config in self._configs:
                config._attn_implementation_internal = IMPLEMENTATION
            yield
        finally:
            for config, name in zip(self._configs, before, strict=True):
                config._attn_implementation_internal = name

    def _cost(self, layer: int) -> LayerCost:
        shape, config = self._geometry, self.model.config.get_text_config()
        weights = sum(_active_weights(weight, config) for weight in self.layers[layer].parameters())
        projections = self._hidden_size * (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        return LayerCost(
            per_row=2.0 * weights,
            per_row_probe=2.0 * projections,
            per_pair=4.0 * shape.heads * shape.head_dim,
            window=_window(self.layers[layer], config),
        )


def _identity(hidden: Tensor, *_: Any, **__: Any) -> Tensor:
    return hidden


def _attention_configs(model: nn.Module) -> list[Any]:
    """Every distinct config object that a module of the model may read its attention from."""
    found: dict[int, Any] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation_internal"):
            found[id(config)] = config
    return list(found.values())


def _active_weights(weight: Tensor, config: Any) -> float:
    """Weights of a matrix that one token meets: for stacked experts, only those it is routed to."""
    if weight.dim() < 2:
        return 0.0
    if weight.dim() == 3:
        return weight.numel() / weight.shape[0] * float(config.num_experts_per_tok)
    return float(weight.numel())


def _window(layer: nn.Module, config: Any) -> int | None:
    """Sliding window of a layer: its own where it has one, else the model's."""
    for module in layer.modules():
        if hasattr(module, "sliding_window"):
            return cast("int | None", module.sliding_window)
    return None if getattr(config, "layer_types", None) else getattr(config, "sliding_window", None)
