"""VLLMStack: a model loaded by vLLM, driven layer by layer inside its worker, unpatched.

vLLM's attention layers look themselves up by name in the forward context. While a layer is driven,
a stand-in answers to that name: it receives query, key and value after norms and rotary, and what
it gives back goes on through the layer's own code. What else a layer is to be given, the model
itself says, in a recording pass: native models hand on a state and a residual, or a state alone,
those of the Transformers backend rotary tables, too.
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor, distributed, nn
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_tp_group
from vllm.forward_context import (
    ForwardContext,
    get_forward_context,
    override_forward_context,
    set_forward_context,
)

from cacheblend_rag.blend.attention import attention_bytes
from cacheblend_rag.blend.copy_stream import COPY_STREAM_BYTES
from cacheblend_rag.blend.cost import LayerCost
from cacheblend_rag.blend.fused import FusedKV, RingKV
from cacheblend_rag.blend.rotary import Layout, Rotation, Table, normal_table
from cacheblend_rag.blend.stack import Attend, AttentionCall, Geometry, Reduction
from cacheblend_rag.engines.vllm.connector.compatibility import check_attention
from cacheblend_rag.engines.vllm.connector.compiled import CompiledOps
from cacheblend_rag.errors import UnsupportedModelError

KEPT_ROTATIONS = 64
WRITTEN_AT_ONCE = 4096
"""Tokens of which KV is copied, to be written into the paged cache."""


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
        impl = self.layer.impl
        if query.dtype != key.dtype:  # with an fp8 cache, some kernels take the query quantized
            query = query.to(key.dtype) * self.layer._q_scale.to(key.dtype)
        call = AttentionCall(
            layer=self.index,
            query=query.transpose(0, 1)[None],
            key=key.transpose(0, 1)[None],
            value=value.transpose(0, 1)[None],
            scaling=float(impl.scale),
            window=window_of(self.layer),
            softcap=_softcap_of(self.layer),
            sinks=getattr(impl, "sinks", None),
        )
        output.copy_(self.attend(call)[0].reshape(output.shape))
        return output


class _RecordedError(Exception):
    """Raised out of a layer of a recording pass: nothing after it is needed."""


@dataclass(frozen=True, slots=True)
class _PositionInputs:
    """Where rows stand. arguments: of each layer, as the model itself would pass them there."""

    positions: Tensor
    arguments: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class _Ways:
    """How a model calls its layers: the names of what changes, and what they give back.

    batched: hidden states have a batch dimension. answers: things that a layer returns, of which
    the first one (with ``residual``, the first two) is handed on; 0 is a bare tensor.
    """

    hidden: str
    positions: str | None
    residual: str | None
    batched: bool
    answers: int


class VLLMStack:
    """A DecoderStack over the model in a vLLM worker.

    attention: the worker's attention layers by name. row_block: see DecoderStack. Where a model
    hands a state and a residual from layer to layer, hidden states are both, side by side: (1,
    rows, 2 x hidden). layouts: how each layer turns its keys, as a trial found it. met: set where
    all tensor-parallel ranks must take part.

    Raises UnsupportedModelError when the model is not a plain stack of decoder layers.
    """

    def __init__(
        self, attention: Mapping[str, Any], vllm_config: VllmConfig, row_block: int
    ) -> None:
        if not attention:
            raise UnsupportedModelError("the model has no attention layers")
        self.names, self.attention = list(attention), list(attention.values())
        self.row_block = row_block
        self.model = _model_with(self.names[0], self.attention[0])
        self.layers = _decoder_layers(self.model, self.names)
        if any(not hasattr(layer, "head_size") for layer in self.attention):
            raise UnsupportedModelError("a layer is no ordinary attention")
        check_attention(self.attention)
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
        self._signatures = [inspect.signature(type(layer).forward) for layer in self.layers]
        self._hidden_size = vllm_config.model_config.get_hidden_size()
        self._compiled = CompiledOps(self.layers, vllm_config)
        self._stand_ins = [_StandIn(i, layer) for i, layer in enumerate(self.attention)]
        self._in_context = dict(zip(self.names, self._stand_ins, strict=True))
        self._ways = self._found_ways()
        self._constant = self._constant_arguments()
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
        bound = self._record_first(input_ids=token_ids[0])
        states = bound[self._ways.hidden]
        states = states if self._ways.batched else states[None]
        return states if self._ways.residual is None else _beside(states, None)

    def position_inputs(self, positions: Tensor) -> _PositionInputs:
        where = positions[0].repeat(2) if positions.shape[1] == 1 else positions[0]
        arguments = self._constant or self._arguments(where, self._geometry.dtype)
        return _PositionInputs(where, arguments)

    def run_layer(
        self, layer: int, hidden: Tensor, position_inputs: _PositionInputs, attend: Attend
    ) -> Tensor:
        if hidden.shape[1] == 1:  # run as two: kernels for one row are others, or not compiled yet
            twice = hidden.repeat(1, 2, 1)
            return self.run_layer(layer, twice, position_inputs, _on_first_row(attend))[:, :1]
        self.met = True
        moving = self._moving(layer, hidden, position_inputs)
        given = {**position_inputs.arguments[layer], **moving}
        with self._answering(layer, attend), self._compiled.within(layer):
            done = self.layers[layer](**given)
        return self._hidden_of(done)

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
            handed = self._arguments(where, torch.float32)  # as precise as the model can say it
            own = [arguments.get("position_embeddings") for arguments in handed]
        for rotary in own:
            if id(rotary) not in made:
                made[id(rotary)] = _table(rotary, offset, self._geometry.device)
        return [made[id(rotary)] for rotary in own]

    def pass_bytes(self, tokens: int, *, checks: bool = False) -> int:
        """Return the most device memory that a pass over so many tokens takes, in bytes.

        That is two layers' fused KV, what is copied of it into the paged cache at once, and on a
        GPU of chunk KV that arrives; all tokens' hidden states, what attention lays out, and what a
        layer holds of one block of rows: its widest activations four times over, at most.
        checks: whether it compares fresh with cached KV in some layer: that holds the fresh KV,
        what is compared of both, and keys or values three times over in float32.
        """
        shape, size = self._geometry, self._geometry.dtype.itemsize
        widest = max(_width(module) for layer in self.layers for module in layer.modules())
        rows = min(tokens, self.row_block)
        in_steps = any(
            getattr(layer.impl, "sinks", None) is not None or _softcap_of(layer)
            for layer in self.attention
        )
        attention = attention_bytes(
            tokens, shape.heads, shape.kv_heads, shape.device, size, in_steps=in_steps
        )
        hidden = (tokens + 3 * rows) * 2 * self._hidden_size * size
        one = replace(shape, layers=1)
        copied = FusedKV.bytes_for(one, min(tokens, WRITTEN_AT_ONCE))
        fused = RingKV.bytes_for(shape, tokens) + copied
        fused += COPY_STREAM_BYTES if shape.device.type == "cuda" else 0
        if checks:
            wide = FusedKV.bytes_for(replace(one, dtype=torch.float32), tokens)
            fused += 3 * FusedKV.bytes_for(one, tokens) + 3 * wide // 2
        return int(fused + attention + hidden + 4 * rows * widest * size)

    def all_reduce(self, part: Tensor, how: Reduction) -> Tensor:
        return all_reduce(part, how)

    def broadcast(self, part: Tensor) -> Tensor:
        return broadcast(part)

    @contextmanager
    def recorded(self) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
        """Note the hidden states before and after each layer, while the model itself runs."""
        inputs: list[Tensor] = []
        outputs: list[Tensor] = []

        def note(layer: int) -> Callable[..., Any]:
            own = self.layers[layer].forward

            def forward(*given: Any, **named: Any) -> Any:
                bound = self._bound(layer, given, named)
                states = bound[self._ways.hidden]
                states = states if self._ways.batched else states[None]
                if self._ways.residual is not None:
                    states = _beside(states, bound[self._ways.residual])
                inputs.append(states.clone())
                done = own(*given, **named)
                outputs.append(self._hidden_of(done).clone())
                return done

            return forward

        with self._replaced({layer: note(layer) for layer in range(len(self.layers))}):
            yield inputs, outputs

    def run_model(self, token_ids: Tensor, positions: Tensor, metadata: Any, slots: Tensor) -> None:
        """Have vLLM's own layers, not compiled, compute tokens (tokens,) with paged attention."""
        with set_forward_context(
            dict.fromkeys(self.names, metadata),
            self._config,
            slot_mapping=dict.fromkeys(self.names, slots),
            skip_compiled=True,
        ):
            self._call_model(token_ids, positions, None)

    # How layers are called

    def _found_ways(self) -> _Ways:
        """Watch the model call its first layer, and the layer answer."""
        positions = torch.arange(2, device=self._geometry.device)
        bound = self._record_first(positions=positions)
        tensors = {name: value for name, value in bound.items() if isinstance(value, Tensor)}
        hidden = [name for name, value in tensors.items() if value.is_floating_point()]
        if not hidden:
            raise UnsupportedModelError("its layers are handed no hidden state")
        where = [
            name for name, value in tensors.items() if value.data_ptr() == positions.data_ptr()
        ]
        ways = _Ways(
            hidden=hidden[0],
            positions=where[0] if where else None,
            residual="residual" if "residual" in bound else None,
            batched=tensors[hidden[0]].dim() == 3,
            answers=0,
        )
        with self._answering(0, lambda call: torch.zeros_like(call.query).transpose(1, 2)):
            done = self.layers[0](**bound)
        return replace(ways, answers=len(done) if isinstance(done, tuple) else 0)

    def _constant_arguments(self) -> list[dict[str, Any]] | None:
        """What layers are handed beside states and positions; None when it depends on positions."""
        positions = torch.arange(2, device=self._geometry.device)
        moving = {self._ways.hidden, self._ways.positions, self._ways.residual}
        found = [
            {name: value for name, value in handed.items() if name not in moving}
            for handed in self._arguments(positions, self._geometry.dtype)
        ]
        plain = (int, float, str, type(None))
        if all(isinstance(value, plain) for handed in found for value in handed.values()):
            return found
        return None

    def _moving(self, layer: int, hidden: Tensor, inputs: _PositionInputs) -> dict[str, Any]:
        """The arguments that change with the rows: copies, since fused norms work in place."""
        ways = self._ways
        given: dict[str, Any] = {}
        if self._constant is not None and ways.positions is not None:
            given[ways.positions] = inputs.positions[None] if ways.batched else inputs.positions
        states = hidden if ways.batched else hidden[0]
        if ways.residual is None:
            return {**given, ways.hidden: states.clone()}
        states, residual = (half.clone() for half in states.chunk(2, -1))
        return {**given, ways.hidden: states, ways.residual: residual if layer else None}

    def _hidden_of(self, done: Any) -> Tensor:
        """Return what a layer hands on, (1, rows, hidden)."""
        parts = done if isinstance(done, tuple) else (done,)
        states = parts[0] if self._ways.batched else parts[0][None]
        if self._ways.residual is None:
            return cast(Tensor, states)
        return _beside(states, parts[1])

    def _arguments(self, positions: Tensor, dtype: torch.dtype) -> list[dict[str, Any]]:
        """What the model passes each layer for tokens at ``positions`` (rows,), by name."""
        recorded: list[dict[str, Any]] = []

        def record(layer: int) -> Callable[..., Any]:
            def forward(*given: Any, **named: Any) -> Any:
                recorded.append(self._bound(layer, given, named))
                if len(recorded) == len(self.layers):
                    raise _RecordedError
                states = recorded[-1][self._ways.hidden]
                return (states,) * self._ways.answers if self._ways.answers else states

            return forward

        blank = torch.zeros(
            positions.numel(), self._hidden_size, dtype=dtype, device=positions.device
        )
        with self._replaced({layer: record(layer) for layer in range(len(self.layers))}):
            self._call_until_recorded(None, positions, blank)
        return recorded

    def _record_first(
        self, input_ids: Tensor | None = None, positions: Tensor | None = None
    ) -> dict[str, Any]:
        """What the model passes its first layer, by name; one of the two must be given."""
        recorded: list[dict[str, Any]] = []

        def first(*given: Any, **named: Any) -> Any:
            recorded.append(self._bound(0, given, named))
            raise _RecordedError

        known = positions if input_ids is None else input_ids
        assert known is not None  # noqa: S101 (one of the two is given)
        input_ids = torch.zeros_like(known) if input_ids is None else input_ids
        positions = torch.zeros_like(known) if positions is None else positions
        with self._replaced({0: first}):
            self._call_until_recorded(input_ids, positions, None)
        return recorded[0]

    def _call_until_recorded(
        self, input_ids: Tensor | None, positions: Tensor, embeds: Tensor | None
    ) -> None:
        try:
            with self._own_context(skip_compiled=True):
                self._call_model(input_ids, positions, embeds)
        except _RecordedError:
            return
        raise UnsupportedModelError(
            f"{type(self.model).__name__} does not call its {len(self.layers)} layers in order"
        )

    def _call_model(
        self, input_ids: Tensor | None, positions: Tensor, embeds: Tensor | None
    ) -> None:
        if self._config.model_config.uses_mrope:  # of text, the three positions are the same
            positions = positions.expand(3, -1)
        self.model.forward(
            input_ids=input_ids,
            positions=positions,
            intermediate_tensors=None,
            inputs_embeds=embeds,
        )

    def _bound(self, layer: int, given: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
        """Return a layer's arguments by name."""
        signature = self._signatures[layer]
        bound = dict(signature.bind(None, *given, **named).arguments)
        bound.pop(next(iter(signature.parameters)))
        for name, parameter in signature.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                bound |= bound.pop(name, {})
        return bound

    @contextmanager
    def _replaced(self, functions: Mapping[int, Callable[..., Any]]) -> Iterator[None]:
        """Let some layers' forward be other functions for a while."""
        with ExitStack() as restore:
            for layer, function in functions.items():
                module = self.layers[layer]
                module.forward = function
                restore.callback(module.__dict__.pop, "forward")
            yield

    @contextmanager
    def _answering(self, layer: int, attend: Attend) -> Iterator[None]:
        """Have the stand-in of a layer's attention compute it by ``attend``."""
        stand_in = self._stand_ins[layer]
        stand_in.attend = attend
        try:
            with self._own_context():
                yield
        finally:
            stand_in.attend = None

    @contextmanager
    def _own_context(self, **changes: Any) -> Iterator[None]:
        """A forward context of our own: what the step under way says of its tokens is not ours."""
        with set_forward_context(None, self._config):
            context: ForwardContext = get_forward_context()
        own = replace(
            context,
            no_compile_layers={**context.no_compile_layers, **self._in_context},
            all_moe_layers=None,  # a layer that is driven alone looks its experts up by name
            **changes,
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


def _beside(states: Tensor, residual: Tensor | None) -> Tensor:
    """Lay a state and a residual side by side: (1, rows, 2 x hidden)."""
    residual = torch.zeros_like(states) if residual is None else residual
    return torch.cat((states, residual.view_as(states)), -1)


def _rotary_of(layer: nn.Module) -> Any:
    """Return the rotary embedding that a layer holds, or None; raises where there are several."""
    found = {id(m): m for m in layer.modules() if hasattr(m, "_compute_cos_sin_cache")}
    if len(found) > 1:
        raise UnsupportedModelError("a layer has several rotary embeddings")
    return next(iter(found.values()), None)


def _table(rotary: Any, offset: int, device: torch.device) -> Table | None:
    """Return the turns by ``offset`` that a rotary embedding computes, or that were handed on."""
    if not hasattr(rotary, "_compute_cos_sin_cache"):
        return normal_table(rotary)
    if not hasattr(rotary, "_cacheblend_turns"):  # kept on the host, in float32
        rotary._cacheblend_turns = rotary._compute_cos_sin_cache().float().cpu().chunk(2, -1)
    cos, sin = (part[abs(offset)].to(device) for part in rotary._cacheblend_turns)
    return normal_table((cos, -sin if offset < 0 else sin))


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
    """Return the ranks as they reach each other from where ``part`` is."""
    ranks = get_tp_group()
    here = ranks.cpu_group if part.device.type == "cpu" else ranks.device_group
    return cast(distributed.ProcessGroup, here)


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


def _softcap_of(attention: Any) -> float | None:
    return float(getattr(attention.impl, "logits_soft_cap", None) or 0) or None


def _decoder_layers(model: nn.Module, names: Sequence[str]) -> list[nn.Module]:
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


def _width(module: Any) -> int:
    """Return how wide the output of a linear layer is, 0 of other modules."""
    return int(getattr(module, "output_size_per_partition", 0) or 0)


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
