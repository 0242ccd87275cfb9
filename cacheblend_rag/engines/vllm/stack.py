"""VLLMStack: a model loaded by vLLM, driven layer by layer inside its worker, unpatched.

vLLM's attention layers look themselves up by name in the forward context. While a layer is driven,
a stand-in answers to that name: it receives query, key and value after norms and rotary, and what
it gives back goes on through the layer's own code.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, distributed, nn
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_tp_group
from vllm.forward_context import get_forward_context, override_forward_context

from cacheblend_rag.blend.cost import LayerCost
from cacheblend_rag.blend.stack import Agreement, Attend, AttentionCall, Geometry
from cacheblend_rag.engines.vllm.compiled import CompiledOps
from cacheblend_rag.engines.vllm.support import check_attention
from cacheblend_rag.errors import UnsupportedModelError


class _ProbedError(Exception):
    """Raised out of attention to stop a layer once its query, key and value are known."""

    def __init__(self, call: AttentionCall) -> None:
        self.call = call


class _StandIn:
    """Answers to an attention layer's name while that layer is driven; also its own ``impl``."""

    def __init__(self, index: int, layer: Any) -> None:
        self.index, self.layer, self.impl = index, layer, self
        self.layer_name, self.kv_cache = layer.layer_name, layer.kv_cache
        self.attend: Attend | None = None

    def do_kv_cache_update(self, *_: Any, **__: Any) -> None:
        """Store nothing: whoever drives the layer does."""

    def forward(  # noqa: PLR0917 (vLLM's signature)
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        **_: Any,
    ) -> Tensor:
        """Hand (rows, heads, head_dim) over as an AttentionCall; write what comes back."""
        if self.attend is None:
            raise RuntimeError(f"{self.layer_name} was called while another layer was driven")
        call = AttentionCall(
            layer=self.index,
            query=query.transpose(0, 1)[None],
            key=key.transpose(0, 1)[None],
            value=value.transpose(0, 1)[None],
            scaling=float(self.layer.impl.scale),
            window=window_of(self.layer),
            softcap=float(getattr(self.layer.impl, "logits_soft_cap", None) or 0) or None,
        )
        output.copy_(self.attend(call)[0].reshape(output.shape))
        return output


class VLLMStack:
    """A DecoderStack over the model in a vLLM worker; to be used inside a forward context.

    attention: the worker's attention layers by name. Hidden states are (1, rows, 2 x hidden): the
    hidden state and the residual, which vLLM's layers hand on separately, side by side.

    Raises UnsupportedModelError when the model is not a plain stack of decoder layers.
    """

    def __init__(self, attention: Mapping[str, Any], vllm_config: VllmConfig) -> None:
        if not attention:
            raise UnsupportedModelError("the model has no attention layers")
        self.names, self.attention = list(attention), list(attention.values())
        self.model = _model_with(self.names[0], self.attention[0])
        self.layers = [self.model.get_submodule(_decoder_layer(name)) for name in self.names]
        if len({id(layer) for layer in self.layers}) != len(self.layers):
            raise UnsupportedModelError("a decoder layer holds several attention layers")
        first = self.attention[0]
        if any(not hasattr(layer, "head_size") for layer in self.attention):
            raise UnsupportedModelError("a layer is no ordinary attention")
        check_attention(self.attention)
        if len(self.layers) != len(self.model.get_submodule(_layer_list(self.names[0]))):
            raise UnsupportedModelError("some decoder layers have no attention")
        self._geometry = Geometry(
            layers=len(self.layers),
            heads=int(first.num_heads),
            kv_heads=int(first.num_kv_heads),
            head_dim=int(first.head_size),
            dtype=vllm_config.model_config.dtype,
            device=first.kv_cache.device,
        )
        self._hidden_size = vllm_config.model_config.get_hidden_size()
        self._compiled = CompiledOps(self.layers, vllm_config)
        self._stand_ins = [_StandIn(i, layer) for i, layer in enumerate(self.attention)]
        self._in_context = dict(zip(self.names, self._stand_ins, strict=True))
        self._turns = [_Turn.of(layer) for layer in self.layers]
        self._costs = tuple(self._cost(i) for i in range(len(self.layers)))

    @property
    def geometry(self) -> Geometry:
        return self._geometry

    @property
    def costs(self) -> tuple[LayerCost, ...]:
        return self._costs

    def embed(self, token_ids: Tensor) -> Tensor:
        states = self.model.embed_input_ids(token_ids[0])
        return torch.cat((states, torch.zeros_like(states)), -1)[None]

    def at(self, positions: Tensor) -> Tensor:
        return positions[0]

    def run_layer(self, layer: int, hidden: Tensor, place: Tensor, attend: Attend) -> Tensor:
        if hidden.shape[1] == 1:  # run as two: kernels for one row are others, or not compiled yet
            twice = (hidden.repeat(1, 2, 1), place.repeat(2))
            return self.run_layer(layer, *twice, _on_first_row(attend))[:, :1]
        stand_in = self._stand_ins[layer]
        stand_in.attend = attend
        try:
            with self._standing_in(), self._compiled.within(layer):
                done = self.layers[layer](positions=place, **_states(hidden[0], layer))
        finally:
            stand_in.attend = None
        return torch.cat(done, -1)[None]

    def probe_layer(self, layer: int, hidden: Tensor, place: Tensor) -> AttentionCall:
        def stop(call: AttentionCall) -> Tensor:
            raise _ProbedError(call)

        try:
            self.run_layer(layer, hidden, place, stop)
        except _ProbedError as probed:
            return probed.call
        raise RuntimeError(f"{self.names[layer]} was never called")

    def rotation(self, offset: int) -> tuple[Tensor, Tensor]:
        turns = [turn.by(offset) for turn in self._turns]
        return torch.stack([cos for cos, _ in turns]), torch.stack([sin for _, sin in turns])

    def across_ranks(self, part: Tensor, how: Agreement) -> Tensor:
        return across_ranks(part, how)

    @contextmanager
    def _standing_in(self) -> Iterator[None]:
        context = get_forward_context()
        own = replace(
            context,
            no_compile_layers={**context.no_compile_layers, **self._in_context},
            attn_metadata=None,
            slot_mapping={},
            moe_layer_index=0,
        )
        with override_forward_context(own):
            yield

    def _cost(self, layer: int) -> LayerCost:
        shape = self._geometry
        return LayerCost(
            per_row=2.0 * sum(_weights(module) for module in self.layers[layer].modules()),
            per_row_probe=(
                2.0 * self._hidden_size * (shape.heads + 2 * shape.kv_heads) * shape.head_dim
            ),
            per_pair=4.0 * shape.heads * shape.head_dim,
            window=window_of(self.attention[layer]),
        )


@dataclass
class _Turn:
    """Moves keys of one layer: cos and sin (positions, rotary_dim / 2) float32, magnitude out."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def of(cls, layer: nn.Module) -> _Turn:
        """Read the layer's rotary embedding; raises UnsupportedModelError when it cannot serve."""
        found = [m for m in layer.modules() if hasattr(m, "_compute_cos_sin_cache")]
        if len(found) != 1 or not getattr(found[0], "is_neox_style", False):
            raise UnsupportedModelError("keys of this model cannot be re-rotated")
        rotary: Any = found[0]
        if not hasattr(rotary, "_cacheblend_turn"):
            cos, sin = rotary._compute_cos_sin_cache().float().chunk(2, -1)
            magnitude = float(cos[0, 0])
            device = rotary.cos_sin_cache.device
            rotary._cacheblend_turn = cls(
                (cos / magnitude).to(device), (sin / magnitude).to(device)
            )
        return cast(_Turn, rotary._cacheblend_turn)

    def by(self, offset: int) -> tuple[Tensor, Tensor]:
        """Return cos and sin, (rotary_dim,), of a move by ``offset`` positions."""
        cos, sin = self.cos[abs(offset)], self.sin[abs(offset)]
        sign = -1.0 if offset < 0 else 1.0
        return torch.cat((cos, cos)), sign * torch.cat((sin, sin))


def across_ranks(part: Tensor, how: Agreement) -> Tensor:
    """Return one value for all tensor-parallel ranks; see DecoderStack."""
    ranks = get_tp_group()
    if ranks.world_size == 1:
        return part
    whole = part.clone()
    group = ranks.cpu_group if part.device.type == "cpu" else ranks.device_group
    if how == "first":
        distributed.broadcast(whole, ranks.first_rank, group=group)
    else:
        kinds = {"sum": distributed.ReduceOp.SUM, "max": distributed.ReduceOp.MAX}
        distributed.all_reduce(whole, kinds[how], group=group)
    return whole


def _on_first_row(attend: Attend) -> Attend:
    """Compute attention for the first of two equal rows, and give it to both."""

    def both(call: AttentionCall) -> Tensor:
        one = {name: getattr(call, name)[:, :, :1] for name in ("query", "key", "value")}
        return attend(replace(call, **one)).repeat(1, 2, 1, 1)

    return both


def window_of(attention: Any) -> int | None:
    """Return an attention layer's sliding window in tokens, itself included, or None."""
    window = getattr(attention, "sliding_window", None)
    return int(window) if window else None


def _states(hidden: Tensor, layer: int) -> dict[str, Tensor | None]:
    """Hidden state and residual as a layer takes them: copies, since fused norms work in place."""
    states, residual = (half.clone() for half in hidden.chunk(2, -1))
    return {"hidden_states": states, "residual": residual if layer else None}


def _layer_list(name: str) -> str:
    """Return the part of an attention layer's name that names the list of decoder layers."""
    before, found, _ = name.partition(".layers.")
    if not found:
        raise UnsupportedModelError(f"{name} is in no list of decoder layers")
    return f"{before}.layers"


def _decoder_layer(name: str) -> str:
    """Return the part of an attention layer's name that names its decoder layer."""
    listed = _layer_list(name)
    return f"{listed}.{name.removeprefix(listed)[1:].partition('.')[0]}"


def _model_with(name: str, attention: nn.Module) -> Any:
    """Find the model an attention layer belongs to: a worker hands out layers, not the model."""
    for found in gc.get_objects():
        # Asked of the type: lazy modules import themselves when an instance is asked.
        if issubclass(type(found), nn.Module) and hasattr(found, "embed_input_ids"):
            try:
                if found.get_submodule(name) is attention:
                    return found
            except AttributeError:
                continue
    raise UnsupportedModelError("the model around the attention layers was not found")


def _weights(module: Any) -> float:
    """Weights of this shard that one token meets in a module itself.

    Read off sizes, since a CPU repacks the tensors. Of experts, only those a token is routed to.
    """
    if hasattr(module, "intermediate_size_per_partition") and hasattr(module, "top_k"):
        return float(3 * module.hidden_size * module.intermediate_size_per_partition * module.top_k)
    if hasattr(module, "input_size_per_partition"):
        return float(module.input_size_per_partition * module.output_size_per_partition)
    if hasattr(module, "input_size") and hasattr(module, "output_size"):
        return float(module.input_size * module.output_size)
    return 0.0
