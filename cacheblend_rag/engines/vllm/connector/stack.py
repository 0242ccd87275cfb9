"""Runs a model loaded by vLLM layer by layer inside its worker, unpatched."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from functools import lru_cache
from inspect import isfunction
from typing import Any, cast

import torch
from torch import Tensor, distributed, nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.parallel_state import get_tp_group
from vllm.forward_context import set_forward_context
from vllm.model_executor.custom_op import CustomOp

from cacheblend_rag.blend.attention import attention_bytes
from cacheblend_rag.blend.copy_stream import COPY_STREAM_BYTES
from cacheblend_rag.blend.cost import LayerCost
from cacheblend_rag.blend.fused import FusedKV, RingKV
from cacheblend_rag.blend.rotary import Layout, Rotation, Table, normal_table
from cacheblend_rag.blend.stack import Attend, Geometry, Reduction, replaced
from cacheblend_rag.engines.vllm.connector.compatibility import check_attention, check_weights
from cacheblend_rag.engines.vllm.connector.layer_calls import (
    Arguments,
    LayerCalls,
    StandIns,
    on_first_row,
    softcap_of,
    window_of,
)
from cacheblend_rag.errors import UnsupportedModelError

KEPT_ROTATIONS = 64
WRITTEN_AT_ONCE = 4096
"""How many tokens' KV is made contiguous at a time for vLLM's function that writes the paged cache.
On CPUs, float32 KV of consecutive tokens is written from strided views instead."""


class VLLMStack:
    """A DecoderStack over the model in a vLLM worker.

    attention: the worker's attention layers by name. row_block: see DecoderStack. If a model passes
    a state and a residual from layer to layer, hidden states are both, side by side: (1, rows, 2 x
    hidden). layouts: how each layer rotates its keys, as found by a trial. met: set if all
    tensor-parallel ranks must take part.

    Raises UnsupportedModelError when the model is not a plain stack of decoder layers.
    """

    def __init__(
        self, attention: Mapping[str, Any], vllm_config: VllmConfig, row_block: int
    ) -> None:
        if not attention:
            raise UnsupportedModelError("the model has no attention layers")
        self.names, self.attention = list(attention), list(attention.values())
        self.row_block = row_block
        self.model, places = model_with(attention)
        self.layers = decoder_layers(self.model, places)
        if any(not hasattr(layer, "head_size") for layer in self.attention):
            raise UnsupportedModelError("a layer's attention is not vLLM's ordinary attention")
        check_attention(self.attention)
        check_weights(self.layers)
        first = self.attention[0]
        self._geometry = Geometry(
            layers=len(self.layers),
            heads=int(first.num_heads),
            kv_heads=int(first.num_kv_heads),
            head_dim=int(first.head_size),
            dtype=vllm_config.model_config.dtype,
            device=first.kv_cache.device,
        )
        self._config, self.met = vllm_config, False
        self._compiled = CompiledOps(self.layers, vllm_config)
        self._stand_ins = StandIns(attention, vllm_config)
        self._calls = LayerCalls(
            self.model, self.layers, self._geometry, self._stand_ins, vllm_config
        )
        self.layouts: Sequence[Layout | None] | None = None
        self._rotation = lru_cache(KEPT_ROTATIONS)(self._rotation_by)
        self._costs = tuple(self._cost(i) for i in range(len(self.layers)))

    @property
    def geometry(self) -> Geometry:
        return self._geometry

    @property
    def costs(self) -> tuple[LayerCost, ...]:
        return self._costs

    @property
    def windows(self) -> list[int | None]:
        """Keys that a row of each layer sees at most, itself included; None is without limit."""
        return [window_of(layer) for layer in self.attention]

    @property
    def is_quantized(self) -> bool:
        """Whether the model's weights are in fewer bits than it computes in."""
        return self._config.model_config.quantization is not None

    def embed(self, token_ids: Tensor) -> Tensor:
        self.met = True
        return self._calls.embed(token_ids[0])

    def position_inputs(self, positions: Tensor) -> list[Arguments]:
        """Return the arguments of each layer, as the model itself would pass them."""
        where = positions[0].repeat(2) if positions.shape[1] == 1 else positions[0]
        return self._calls.arguments(where)

    def run_layer(
        self, layer: int, hidden: Tensor, position_inputs: list[Arguments], attend: Attend
    ) -> Tensor:
        if hidden.shape[1] == 1:  # run as two: kernels for one row are others, or not compiled yet
            twice = hidden.repeat(1, 2, 1)
            return self.run_layer(layer, twice, position_inputs, on_first_row(attend))[:, :1]
        self.met = True
        given = self._calls.given(layer, hidden, position_inputs[layer])
        with self._stand_ins.answering(layer, attend), self._compiled.within(layer):
            done = self.layers[layer](**given)
        return self._calls.hidden_of(done)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits (rows, vocabulary) of final hidden states (1, rows, hidden).

        Raises UnsupportedModelError when this rank does not get them.
        """
        if hidden.shape[1] == 1:  # run as two, as layers are
            return self.logits(hidden.repeat(1, 2, 1))[:1]
        self.met = True
        logits = self.model.compute_logits(self._calls.output_of(hidden))
        if logits is None:
            raise UnsupportedModelError("vLLM gathers logits on one rank only")
        return cast(Tensor, logits)

    def rotation(self, offset: int) -> Rotation:
        return self._rotation(offset)

    def _rotation_by(self, offset: int) -> Rotation:
        return Rotation.over_tables(self.tables(offset), self.layouts)

    def tables(self, offset: int) -> list[Table | None]:
        """Return each layer's rotary table for a move by ``offset``; see TransformersStack."""
        own = [_rotary_of(layer) for layer in self.layers]
        made: dict[int, Table | None] = {}
        if all(rotary is None for rotary in own):
            where = torch.tensor([offset], device=self._geometry.device)
            # In float32, the model's own precision of it.
            handed = self._calls.arguments(where, torch.float32)
            own = [arguments.get("position_embeddings") for arguments in handed]
        for rotary in own:
            if id(rotary) not in made:
                made[id(rotary)] = _table(rotary, offset, self._geometry.device)
        return [made[id(rotary)] for rotary in own]

    def pass_bytes(self, tokens: int, *, checks: bool = False) -> int:
        """Return the peak device memory of a pass over so many tokens, in bytes.

        That is two layers' fused KV, one more in the paged cache's layout, what is copied of it at
        once, and on a GPU of chunk KV that arrives; all tokens' hidden states, what attention lays
        out, and what a layer holds of one block of rows: its widest activations four times over, at
        most.
        checks: whether it compares fresh with cached KV in some layer: that holds what is compared
        of both, and keys or values three times over in float32.
        """
        shape, size = self._geometry, self._geometry.dtype.itemsize
        widest = max(_width(module) for layer in self.layers for module in layer.modules())
        rows = min(tokens, self.row_block)
        in_steps = any(
            getattr(layer.impl, "sinks", None) is not None or softcap_of(layer)
            for layer in self.attention
        )
        attention = attention_bytes(
            tokens, shape.heads, shape.kv_heads, shape.device, size, in_steps=in_steps
        )
        hidden = (tokens + 3 * rows) * 2 * self._calls.hidden_size * size
        one = replace(shape, layers=1)
        copied = FusedKV.bytes_for(one, min(tokens, WRITTEN_AT_ONCE))
        in_layout = FusedKV.bytes_for(one, tokens) * len({a.kv_cache.dtype for a in self.attention})
        fused = RingKV.bytes_for(shape, tokens) + in_layout + copied
        fused += COPY_STREAM_BYTES if shape.device.type == "cuda" else 0
        if checks:
            wide = FusedKV.bytes_for(replace(one, dtype=torch.float32), tokens)
            fused += 2 * FusedKV.bytes_for(one, tokens) + 3 * wide // 2
        return int(fused + attention + hidden + 4 * rows * widest * size)

    def all_reduce(self, part: Tensor, how: Reduction) -> Tensor:
        return all_reduce(part, how)

    def broadcast(self, part: Tensor) -> Tensor:
        return broadcast(part)

    def recorded(self) -> AbstractContextManager[tuple[list[Tensor], list[Tensor]]]:
        """Record the hidden states before and after each layer, while the model itself runs."""
        return self._calls.recorded()

    def run_model(
        self, token_ids: Tensor, positions: Tensor, layers: Sequence[tuple[Any, Tensor]]
    ) -> None:
        """Run vLLM's own layers, uncompiled, on tokens (tokens,) with paged attention.

        layers: each layer's metadata and the slots of its KV.
        """
        with set_forward_context(
            {name: one[0] for name, one in zip(self.names, layers, strict=True)},
            self._config,
            slot_mapping={name: one[1] for name, one in zip(self.names, layers, strict=True)},
            skip_compiled=True,
        ):
            self._calls.call_model(token_ids, positions)

    def _cost(self, layer: int) -> LayerCost:
        shape = self._geometry
        return LayerCost(
            per_row=2.0 * sum(_weights(module) for module in self.layers[layer].modules()),
            per_row_probe=(
                2.0 * self._calls.hidden_size * (shape.heads + 2 * shape.kv_heads) * shape.head_dim
            ),
            per_pair=4.0 * shape.heads * shape.head_dim,
            window=window_of(self.attention[layer]),
        )


def _rotary_of(layer: nn.Module) -> Any:
    """Return a layer's rotary embedding, or None; raises if there are several."""
    found = {id(m): m for m in layer.modules() if hasattr(m, "_compute_cos_sin_cache")}
    if len(found) > 1:
        raise UnsupportedModelError("a layer has several rotary embeddings")
    return next(iter(found.values()), None)


def _table(rotary: Any, offset: int, device: torch.device) -> Table | None:
    """Return a rotary embedding's table for ``offset``, or the recorded one."""
    if not hasattr(rotary, "_compute_cos_sin_cache"):
        return normal_table(rotary)
    if not hasattr(rotary, "_cacheblend_turns"):  # kept on the host, in float32
        rotary._cacheblend_turns = rotary._compute_cos_sin_cache().float().cpu().chunk(2, -1)
    cos, sin = (part[abs(offset)].to(device) for part in rotary._cacheblend_turns)
    return normal_table((cos, -sin if offset < 0 else sin))


def _width(module: Any) -> int:
    """Return the output width of a linear layer, 0 for other modules."""
    return int(getattr(module, "output_size_per_partition", 0) or 0)


def _weights(module: Any) -> float:
    """Weights of this shard that one token uses in a module itself.

    Read off sizes, since a CPU repacks the tensors. Of experts, only those a token is routed to.
    """
    if hasattr(module, "intermediate_size_per_partition") and hasattr(module, "top_k"):
        return float(3 * module.hidden_size * module.intermediate_size_per_partition * module.top_k)
    if hasattr(module, "input_size_per_partition"):
        return float(module.input_size_per_partition * module.output_size_per_partition)
    if hasattr(module, "input_size") and hasattr(module, "output_size"):
        return float(module.input_size * module.output_size)
    return 0.0


COMPILED = ("layernorm", "activation", "rotary_embedding")


class CompiledOps:
    """Operations of some layers, compiled as vLLM's compiler would.

    They are norms, activations and rotary embeddings and, on a CPU, experts. In a compiled model
    vLLM leaves these to the compiler, which generates kernels. A layer that is run alone would
    execute them eagerly, which is slower and rounds differently. If vLLM does not compile, neither
    does this class.
    """

    def __init__(self, layers: Iterable[nn.Module], vllm_config: VllmConfig) -> None:
        self._made: list[list[tuple[Any, str, Callable[..., Any]]]] = []
        with set_current_vllm_config(vllm_config):
            for layer in layers:
                left = [(module, *found) for module in layer.modules() if (found := _left(module))]
                # vLLM's own hook, which also serves modules that are no CustomOp.
                self._made.append(
                    [
                        (module, name, CustomOp.maybe_compile(module, method))
                        for module, name, method in left
                    ]
                )

    @contextmanager
    def within(self, layer: int) -> Iterator[None]:
        """Let a layer use them inside the block."""
        with ExitStack() as restore:
            for module, name, compiled in self._made[layer]:
                restore.enter_context(replaced(module, name, compiled))
            yield


def _left(module: Any) -> tuple[str, Callable[..., Any]] | None:
    """Return a module's method that vLLM leaves to the compiler, and its attribute name."""
    if isinstance(module, CustomOp):
        kind = type(module)
        is_small = any(f".layers.{name}" in kind.__module__ for name in COMPILED)
        if is_small and not kind.enabled():
            return "_forward_method", module.forward_native
    elif isfunction(getattr(module, "_forward_entry", None)):  # else experts are one opaque op
        return "_forward_impl", module._forward_impl
    return None


def model_with(attention: Mapping[str, nn.Module]) -> tuple[Any, list[str]]:
    """Find the model of attention layers: vLLM gives a connector the layers, not the model.

    Returns:
        The outermost model, and the layers' places in it.
    """
    found: tuple[Any, dict[int, str]] = None, {}
    for model in gc.get_objects():
        # Asked of the type: lazy modules import themselves when an instance is asked.
        if issubclass(type(model), nn.Module) and hasattr(model, "embed_input_ids"):
            places = {id(module): place for place, module in model.named_modules()}
            if len(places) > len(found[1]) and all(id(one) in places for one in attention.values()):
                found = model, places
    model, places = found
    if model is None:
        raise UnsupportedModelError("found no vLLM model that holds all attention layers")
    return model, [places[id(layer)] for layer in attention.values()]


def decoder_layers(model: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    """Return the decoder layers that attention layers of these names belong to, in order."""
    parts = names[0].split(".")
    for count in range(1, len(parts)):
        listed = ".".join(parts[:count])
        if isinstance(layers := model.get_submodule(listed), nn.ModuleList):
            break
    else:
        raise UnsupportedModelError(f"{names[0]} is in no list of decoder layers")
    found = [name.removeprefix(f"{listed}.").partition(".")[0] for name in names]
    if len(set(found)) != len(found):
        raise UnsupportedModelError("a decoder layer holds several attention layers")
    if len(found) != len(layers):
        raise UnsupportedModelError("some decoder layers have no attention")
    return [model.get_submodule(f"{listed}.{index}") for index in found]


def all_reduce(part: Tensor, how: Reduction) -> Tensor:
    """Return all tensor-parallel ranks' parts as one; see DecoderStack."""
    ranks = get_tp_group()
    if ranks.world_size == 1:
        return part
    kinds = {"sum": distributed.ReduceOp.SUM, "max": distributed.ReduceOp.MAX}
    whole = part.clone()
    distributed.all_reduce(whole, kinds[how], group=_group(part))
    return whole


def broadcast(part: Tensor) -> Tensor:
    """Return the first tensor-parallel rank's part; see DecoderStack."""
    ranks = get_tp_group()
    if ranks.world_size == 1:
        return part
    whole = part.clone()
    distributed.broadcast(whole, ranks.first_rank, group=_group(part))
    return whole


def _group(part: Tensor) -> distributed.ProcessGroup:
    """Return the process group for tensors on the device of ``part``."""
    ranks = get_tp_group()
    here = ranks.cpu_group if part.device.type == "cpu" else ranks.device_group
    return cast(distributed.ProcessGroup, here)
