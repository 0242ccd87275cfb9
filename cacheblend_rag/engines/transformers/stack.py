"""Runs any Hugging Face decoder layer by layer, with attention intercepted.

No layer is rewritten and no model class is named: attention is intercepted by the library's own
means, and a recording pass shows each layer's inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache
from itertools import repeat
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from cacheblend_rag.blend.cost import LayerCost
from cacheblend_rag.blend.passes import Graphed
from cacheblend_rag.blend.rotary import Layout, Rotation, Table, normal_table
from cacheblend_rag.blend.row_attention import can_attend_by_positions
from cacheblend_rag.blend.stack import (
    Attend,
    AttentionCall,
    Geometry,
    NoAttentionError,
    Reduction,
    forwards_replaced,
    probe_layer,
)
from cacheblend_rag.engines.transformers.layer_calls import (
    DRIVEN,
    SIGHT,
    AttentionWindow,
    LayerCalls,
)
from cacheblend_rag.engines.transformers.layer_graphs import LayerGraphs
from cacheblend_rag.errors import UnsupportedModelError

NARROW = (torch.bfloat16, torch.float16)
ROW_BLOCK = 768
ACCELERATOR_ROW_BLOCK = 8192
KEPT_ROTATIONS = 64
EXPERTS_PER_TOKEN = (
    "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts",
)  # fmt: skip


class _WatchedCache:
    """A cache that stores nothing; reading any other attribute of it raises an error.

    A layer that does so depends on the length of the cache and cannot be run on chosen rows.
    For accelerate's hooks, which move objects with a method ``to``, it has no such method.
    """

    def __init__(self, layer: int) -> None:
        self._layer = layer

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the arguments."""
        return key_states, value_states

    def __getattr__(self, name: str) -> Any:
        if name == "to":
            raise AttributeError(name)
        raise UnsupportedModelError(f"layer {self._layer} depends on the cache ({name})")


PositionInputs = Sequence[dict[str, Any]]
"""Keyword arguments of each layer for some positions, as the model passes them."""


class TransformersStack:
    """A DecoderStack over a Hugging Face causal language model.

    decoder: the part of the model that calls the layers. layouts: how each layer rotates its keys,
    from ``find_layouts``; keys cannot be moved before that is set. The model must
    not be used by others while a method runs; its loop ensures that.

    Raises UnsupportedModelError when the model is not a plain stack of attention layers.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._calls = LayerCalls(model)
        self.decoder, self.layers = self._calls.decoder, self._calls.layers
        self._device = model.device
        inner = {id(weight) for layer in self.layers for weight in layer.parameters()}
        self._norms = [
            weight
            for weight in self.decoder.parameters()
            if weight.dim() == 1 and id(weight) not in inner
        ]
        self._windows: Sequence[int | None] = (None,) * len(self.layers)
        zero = torch.zeros(1, 1, dtype=torch.long, device=self._device)
        first = self.embed(zero)
        self._hidden_size = int(first.shape[-1])
        self._windows = self._recorded_windows(zero, first.dtype)
        self._geometry = self._probed_geometry(first, zero)
        self._returns_tuple = False
        self.row_block = ROW_BLOCK if self._device.type == "cpu" else ACCELERATOR_ROW_BLOCK
        self.layouts: Sequence[Layout | None] | None = None
        self._rotation = lru_cache(KEPT_ROTATIONS)(self._rotation_by)
        self._graphs = LayerGraphs(self, self.layers) if _can_have_graphs(model, self) else None

    @property
    def geometry(self) -> Geometry:
        return self._geometry

    @cached_property
    def costs(self) -> tuple[LayerCost, ...]:
        return tuple(self._cost(layer) for layer in range(len(self.layers)))

    @property
    def windows(self) -> Sequence[int | None]:
        """Keys that a row of each layer sees at most, itself included; None is without limit."""
        return self._windows

    def embed(self, token_ids: Tensor) -> Tensor:
        return self._calls.embed(token_ids)

    def position_inputs(self, positions: Tensor) -> PositionInputs:
        return self._layer_arguments(positions, self._geometry.dtype)

    def run_layer(
        self, layer: int, hidden: Tensor, position_inputs: PositionInputs, attend: Attend
    ) -> Tensor:
        with self._calls.attending(repeat((layer, self._windows[layer])), attend):
            out = self.layers[layer](hidden, **position_inputs[layer])
        self._returns_tuple = isinstance(out, tuple)
        return cast(Tensor, out[0] if isinstance(out, tuple) else out)

    @property
    def graphed(self) -> Graphed | None:
        """Returns the layers as CUDA graphs for given rows; None if graphs cannot be used."""
        return None if self._graphs is None else self._graphs.of

    def rotation(self, offset: int) -> Rotation:
        return self._rotation(offset)

    def _rotation_by(self, offset: int) -> Rotation:
        return Rotation.over_tables(self.tables(offset), self.layouts)

    def tables(self, offset: int) -> list[Table | None]:
        """Return each layer's rotary table for a move by ``offset``, None where it gets none.

        cos and sin, (entries,) float32, as the model lays them out, the magnitude divided out.
        Layers that get the same table share one.
        """
        position = torch.tensor([[offset]], device=self._geometry.device)
        made: dict[int, Table | None] = {}
        found: list[Table | None] = []
        with weights_in_float32(self._norms):
            handed_on = self._layer_arguments(position, torch.float32)
        for arguments in handed_on:
            handed = arguments.get("position_embeddings")
            if id(handed) not in made:
                made[id(handed)] = normal_table(handed)
            found.append(made[id(handed)])
        return found

    def all_reduce(self, part: Tensor, how: Reduction) -> Tensor:
        return part

    def broadcast(self, part: Tensor) -> Tensor:
        return part

    def logits(self, hidden: Tensor) -> Tensor:
        """Return (batch, vocabulary) float32 logits of final hidden states (batch, 1, hidden).

        In place of the layers, those are what the model gets, in the form that the layers give it.
        """

        def layer(*_: Any, **__: Any) -> Any:
            return (hidden,) if self._returns_tuple else hidden

        blank = torch.zeros(hidden.shape[:2], dtype=torch.long, device=hidden.device)
        with forwards_replaced(self.layers, lambda _: layer), self._calls.implementation(DRIVEN):
            out = self.model(input_ids=blank, position_ids=blank, use_cache=False, logits_to_keep=1)
        return cast(Tensor, out.logits[:, -1].float())

    def next_logits(self, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Run the whole model on one token of each text; returns (batch, vocabulary) float32.

        token_ids, positions: (batch, 1). attend: attention of each layer, in order, to all the KV
        that the texts have before; it gets the tokens' own.
        """
        with self._calls.attending(enumerate(self._windows), attend):
            out = self.model(
                input_ids=token_ids, position_ids=positions, use_cache=False, logits_to_keep=1
            )
        return cast(Tensor, out.logits[:, -1].float())

    @contextmanager
    def recorded(self) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
        """Record the hidden states before and after each layer, while the model itself runs."""
        inputs: list[Tensor] = []
        outputs: list[Tensor] = []

        def note(layer: int) -> Callable[..., Any]:
            own = self.layers[layer].forward

            def forward(*given: Any, **named: Any) -> Any:
                inputs.append(self._calls.hidden_in(layer, given, named).clone())
                done = own(*given, **named)
                outputs.append((done[0] if isinstance(done, tuple) else done).clone())
                return done

            return forward

        with forwards_replaced(self.layers, note):
            yield inputs, outputs

    def _layer_arguments(
        self, positions: Tensor, dtype: torch.dtype, implementation: str = DRIVEN
    ) -> list[dict[str, Any]]:
        """Return the arguments of each layer for tokens at ``positions`` (batch, rows)."""
        blank = torch.zeros(1, 1, self._hidden_size, dtype=dtype, device=positions.device)
        return self._calls.arguments(positions, blank, implementation)

    def _recorded_windows(self, position: Tensor, dtype: torch.dtype) -> list[int | None]:
        """Return each layer's attention window; raises UnsupportedModelError for other masks."""
        handed = self._layer_arguments(position, dtype, SIGHT)
        named = [_named_window(layer) for layer in self.layers]
        flash = self._calls.replaces_flash
        windows: list[int | None] = []
        for layer, arguments in enumerate(handed):
            mask = arguments.get("attention_mask")
            if flash or not isinstance(mask, AttentionWindow):
                windows.append(named[layer])  # kernels of that kind go by the layer's own word
            else:
                windows.append(mask.window(layer))
        return windows

    def _probed_geometry(self, hidden: Tensor, position: Tensor) -> Geometry:
        """Ask the layers for the shapes of their queries, keys and values."""
        arguments = self._layer_arguments(position, hidden.dtype)
        for layer, named in enumerate(arguments):
            if "past_key_values" in named:
                named["past_key_values"] = _WatchedCache(layer)
        calls = [self._probed(i, hidden, arguments) for i in range(len(self.layers))]
        first = calls[0]
        for call in calls:
            if call.value.shape != call.key.shape:
                raise UnsupportedModelError("values and keys of different widths")
            if (call.query.shape, call.key.shape) != (first.query.shape, first.key.shape):
                raise UnsupportedModelError("layers of different shapes")
            if call.key.device != first.key.device:
                raise UnsupportedModelError(
                    f"layers on several devices ({first.key.device}, {call.key.device})"
                )
        if first.key.dim() != 4 or first.key.shape[2] != 1:
            raise UnsupportedModelError("a layer does not compute one key per token")
        return Geometry(
            layers=len(self.layers),
            heads=int(first.query.shape[1]),
            kv_heads=int(first.key.shape[1]),
            head_dim=int(first.key.shape[3]),
            dtype=first.key.dtype,
            device=first.key.device,
        )

    def _probed(self, layer: int, hidden: Tensor, inputs: PositionInputs) -> AttentionCall:
        """Probe a layer; raises UnsupportedModelError when it has attention of its own."""
        try:
            return probe_layer(self, layer, hidden, inputs)
        except (NoAttentionError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise UnsupportedModelError(
                f"layer {layer} ({type(self.layers[layer]).__name__}) does not attend through the "
                "library's attention functions"
            ) from error

    def _cost(self, layer: int) -> LayerCost:
        shape, config = self._geometry, self.model.config.get_text_config()
        weights = sum(_active_weights(weight, config) for weight in self.layers[layer].parameters())
        projections = self._hidden_size * (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        return LayerCost(
            per_row=2.0 * weights,
            per_row_probe=2.0 * projections,
            per_pair=4.0 * shape.heads * shape.head_dim,
            window=self._windows[layer],
        )


def _can_have_graphs(model: PreTrainedModel, stack: TransformersStack) -> bool:
    """Whether all weights stay on one GPU, and the Triton attention kernel takes its heads."""
    is_spread = any(weight.device != stack.geometry.device for weight in model.parameters())
    # Accelerate's hooks move weights in and out around each forward.
    is_moved = any(hasattr(module, "_hf_hook") for module in model.modules())
    return can_attend_by_positions(stack.geometry) and not is_spread and not is_moved


def _named_window(layer: nn.Module) -> int | None:
    """The sliding window that a layer itself names."""
    for module in layer.modules():
        if hasattr(module, "sliding_window"):
            return cast("int | None", module.sliding_window)
    return None


def _active_weights(weight: Tensor, config: Any) -> float:
    """Weights of a matrix that one token meets: for stacked experts, only those it is routed to."""
    if weight.dim() < 2:
        return 0.0
    if weight.dim() == 3:
        return weight.numel() / weight.shape[0] * _experts_per_token(config, weight.shape[0])
    return float(weight.numel())


def _experts_per_token(config: Any, experts: int) -> float:
    """How many experts a token is routed to, by whichever name the config has for it."""
    named = (getattr(config, name, None) for name in EXPERTS_PER_TOKEN)
    found = [value for value in named if value]
    first = found[0] if found else experts
    return float(first[0] if isinstance(first, Sequence) else first)


@contextmanager
def weights_in_float32(weights: Sequence[Tensor]) -> Iterator[None]:
    """Replace 16-bit weights by float32 copies temporarily."""
    narrow = [(weight, weight.data) for weight in weights if weight.dtype in NARROW]
    try:
        for weight, own in narrow:
            weight.data = own.float()
        yield
    finally:
        for weight, own in narrow:
            weight.data = own
