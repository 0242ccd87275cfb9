"""How a model calls its decoder layers, recorded from the model itself, and running one alone.

Native models of vLLM pass a state and a residual from layer to layer, or only a state; those of its
Transformers backend pass rotary tables, too. So the model is run with other functions in place of
its layers, which record what they are given.

vLLM's attention layers look themselves up by name in the forward context. While a layer runs alone,
a stand-in has that name: it receives query, key and value after norms and rotary, and the layer's
own code continues with its result.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.forward_context import (
    ForwardContext,
    get_forward_context,
    override_forward_context,
    set_forward_context,
)

from cacheblend_rag.blend.stack import (
    Attend,
    AttentionCall,
    Geometry,
    RecordedError,
    forwards_replaced,
)
from cacheblend_rag.errors import UnsupportedModelError

Arguments = dict[str, Any]
"""A layer's arguments by name."""
RESIDUAL = "residual"
"""The parameter of layers that pass on a residual beside the state; the first one's is None."""


class LayerCalls:
    """The inputs that a model passes to its layers, and the layers' results.

    hidden_size: of the model. If layers pass on a state and a residual, hidden states here are
    both, side by side: (1, rows, 2 x hidden).

    Raises UnsupportedModelError when the model does not call its layers one after another.
    """

    def __init__(
        self,
        model: Any,
        layers: Sequence[nn.Module],
        geometry: Geometry,
        stand_ins: StandIns,
        vllm_config: VllmConfig,
    ) -> None:
        self._model, self._layers, self._geometry = model, layers, geometry
        self._stand_ins, self._config = stand_ins, vllm_config
        self.hidden_size = int(vllm_config.model_config.get_hidden_size())
        self._signatures = [inspect.signature(type(layer).forward) for layer in layers]
        self._learn_form()

    def _learn_form(self) -> None:
        """Find out how the model calls its first layer, and what the layer returns."""
        two = torch.zeros(2, dtype=torch.long, device=self._geometry.device)
        (first,) = self._record(1, input_ids=two, positions=two)
        states = [
            name
            for name, value in first.items()
            if isinstance(value, Tensor) and value.is_floating_point()
        ]
        if not states:
            raise UnsupportedModelError("its layers get no hidden state")
        self._state = states[0]
        self._has_residual = RESIDUAL in first
        self._is_batched = first[self._state].dim() == 3
        with self._stand_ins.answering(0, _attend_to_nothing):
            done = self._layers[0](**first)
        self._result_count = len(done) if isinstance(done, tuple) else 0
        """Length of the tuple that a decoder layer returns; 0 if it returns a tensor."""

    def embed(self, token_ids: Tensor) -> Tensor:
        """Return the input of the first layer for tokens (rows,)."""
        (first,) = self._record(1, input_ids=token_ids, positions=torch.zeros_like(token_ids))
        return self._hidden_in(first)

    def arguments(self, positions: Tensor, dtype: torch.dtype | None = None) -> list[Arguments]:
        """Return each layer's arguments, hidden states aside, for tokens at ``positions`` (rows,).

        dtype: of what the model computes for the layers; by default its own.
        """
        blank = torch.zeros(
            positions.numel(),
            self.hidden_size,
            dtype=dtype or self._geometry.dtype,
            device=positions.device,
        )
        recorded = self._record(len(self._layers), positions=positions, embeds=blank)
        passed_on = {self._state, RESIDUAL}
        return [
            {name: value for name, value in one.items() if name not in passed_on}
            for one in recorded
        ]

    def given(self, layer: int, hidden: Tensor, arguments: Mapping[str, Any]) -> Arguments:
        """Return all of a layer's arguments: copies of states, since fused norms work in place."""
        state, *residual = (part.clone() for part in self._parts(hidden))
        given = {**arguments, self._state: state}
        if residual:
            given[RESIDUAL] = residual[0] if layer else None
        return given

    def hidden_of(self, done: Any) -> Tensor:
        """Return a layer's output for the next layer, (1, rows, hidden)."""
        parts = done if isinstance(done, tuple) else (done,)
        return self._hidden(parts[0], parts[1] if self._has_residual else None)

    def output_of(self, hidden: Tensor) -> Tensor:
        """Return the model's output (rows, hidden) for its last layer's (1, rows, hidden)."""
        rows = torch.zeros(hidden.shape[1], dtype=torch.long, device=hidden.device)

        def last(*_: Any, **__: Any) -> Any:
            return self._result(*(part.clone() for part in self._parts(hidden)))

        with (
            forwards_replaced(self._layers, lambda _: last),
            self._stand_ins.context(skip_compiled=True),
        ):
            return cast(Tensor, self.call_model(rows, rows))

    @contextmanager
    def recorded(self) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
        """Record the hidden states before and after each layer, while the model itself runs."""
        inputs: list[Tensor] = []
        outputs: list[Tensor] = []

        def note(layer: int) -> Callable[..., Any]:
            own = self._layers[layer].forward

            def forward(*given: Any, **named: Any) -> Any:
                inputs.append(self._hidden_in(self._bound(layer, given, named)).clone())
                done = own(*given, **named)
                outputs.append(self.hidden_of(done).clone())
                return done

            return forward

        with forwards_replaced(self._layers, note):
            yield inputs, outputs

    def call_model(
        self, input_ids: Tensor | None, positions: Tensor, embeds: Tensor | None = None
    ) -> Any:
        """Call the model itself, in the current forward context; returns its output."""
        if self._config.model_config.uses_mrope:  # of text, the three positions are the same
            positions = positions.expand(3, -1)
        return self._model.forward(
            input_ids=input_ids,
            positions=positions,
            intermediate_tensors=None,
            inputs_embeds=embeds,
        )

    def _record(
        self,
        count: int,
        *,
        positions: Tensor,
        input_ids: Tensor | None = None,
        embeds: Tensor | None = None,
    ) -> list[Arguments]:
        """Return the arguments of the first ``count`` layers."""
        recorded: list[Arguments] = []

        def record(layer: int) -> Callable[..., Any]:
            def forward(*given: Any, **named: Any) -> Any:
                recorded.append(self._bound(layer, given, named))
                if len(recorded) == count:
                    raise RecordedError
                return self._result(recorded[-1][self._state])

            return forward

        with (
            forwards_replaced(self._layers[:count], record),
            self._stand_ins.context(skip_compiled=True),
        ):
            try:
                self.call_model(input_ids, positions, embeds)
            except RecordedError:
                return recorded
        raise UnsupportedModelError(
            f"{type(self._model).__name__} does not call its {len(self._layers)} layers in order"
        )

    def _bound(self, layer: int, given: Sequence[Any], named: Mapping[str, Any]) -> Arguments:
        """Return a layer's arguments by name."""
        signature = self._signatures[layer]
        bound = dict(signature.bind(None, *given, **named).arguments)
        bound.pop(next(iter(signature.parameters)))
        for name, parameter in signature.parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD:
                bound |= bound.pop(name, {})
        return bound

    def _hidden_in(self, arguments: Mapping[str, Any]) -> Tensor:
        """Return the hidden states among a layer's arguments, (1, rows, hidden)."""
        return self._hidden(arguments[self._state], arguments.get(RESIDUAL))

    def _hidden(self, state: Tensor, residual: Tensor | None) -> Tensor:
        """Return hidden states, (1, rows, hidden), of what layers pass on."""
        state = state if self._is_batched else state[None]
        if not self._has_residual:
            return state
        residual = torch.zeros_like(state) if residual is None else residual
        return torch.cat((state, residual.view_as(state)), -1)

    def _parts(self, hidden: Tensor) -> Sequence[Tensor]:
        """Split what layers pass on into hidden state and residual, if they take a residual."""
        hidden = hidden if self._is_batched else hidden[0]
        return hidden.chunk(2, -1) if self._has_residual else (hidden,)

    def _result(self, *parts: Tensor) -> Any:
        """Return a layer's result that passes these on; what else it returns does not matter."""
        if not self._result_count:
            return parts[0]
        return (*parts, *[parts[0]] * (self._result_count - len(parts)))


def _attend_to_nothing(call: AttentionCall) -> Tensor:
    return torch.zeros_like(call.query).transpose(1, 2)


class StandIns:
    """Gives decoder layers that run alone a forward context, with a stand-in for their attention.

    attention: the worker's attention layers by name, in order.
    """

    def __init__(self, attention: Mapping[str, Any], vllm_config: VllmConfig) -> None:
        self._attention, self._config = list(attention.items()), vllm_config

    @contextmanager
    def answering(self, layer: int, attend: Attend) -> Iterator[None]:
        """Let a layer's attention use ``attend``."""
        name, attention = self._attention[layer]
        with self.context({name: _StandIn(layer, attention, attend)}):
            yield

    @contextmanager
    def context(self, stand_ins: Mapping[str, Any] | None = None, **changes: Any) -> Iterator[None]:
        """Set a separate forward context: the running step's metadata belongs to other tokens."""
        with set_forward_context(None, self._config):
            context: ForwardContext = get_forward_context()
        own = replace(
            context,
            no_compile_layers={**context.no_compile_layers, **(stand_ins or {})},
            all_moe_layers=None,  # a layer that is run alone looks its experts up by name
            **changes,
        )
        with override_forward_context(own):
            yield


class _StandIn:
    """Replaces an attention layer while it runs; it is its own ``impl``, too."""

    def __init__(self, index: int, layer: Any, attend: Attend) -> None:
        self.index, self.layer, self.attend = index, layer, attend
        self.layer_name, self.kv_cache = layer.layer_name, layer.kv_cache

    @property
    def impl(self) -> _StandIn:
        """No attribute: in a circle of references, it would keep a pass's memory for a while."""
        return self

    def do_kv_cache_update(self, *_: Any, **__: Any) -> None:
        """Store nothing: the caller that runs the layer does."""

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
        """Pass (rows, heads, head_dim) on as an AttentionCall; write the result."""
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
            softcap=softcap_of(self.layer),
            sinks=getattr(impl, "sinks", None),
        )
        output.copy_(self.attend(call)[0].reshape(output.shape))
        return output


def on_first_row(attend: Attend) -> Attend:
    """Compute attention for the first of two equal rows, and use it for both."""

    def both(call: AttentionCall) -> Tensor:
        one = {name: getattr(call, name)[:, :, :1] for name in ("query", "key", "value")}
        return attend(replace(call, **one)).repeat(1, 2, 1, 1)

    return both


def window_of(attention: Any) -> int | None:
    """Return an attention layer's sliding window in tokens, itself included, or None."""
    window = getattr(attention, "sliding_window", None)
    return int(window) if window else None


def softcap_of(attention: Any) -> float | None:
    """Return the softcap of an attention layer's logits, or None."""
    return float(getattr(attention.impl, "logits_soft_cap", None) or 0) or None
