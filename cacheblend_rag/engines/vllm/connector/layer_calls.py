"""How a model calls its decoder layers, recorded from the model itself.

Native models of vLLM pass a state and a residual from layer to layer, or only a state; those of its
Transformers backend pass rotary tables, too. In a recording pass other functions replace the layers
and record their inputs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig

from cacheblend_rag.blend.stack import AttentionCall, Geometry, RecordedError, forwards_replaced
from cacheblend_rag.engines.vllm.connector.stand_in import StandIns
from cacheblend_rag.errors import UnsupportedModelError


@dataclass(frozen=True, slots=True)
class PositionInputs:
    """Positions of rows. arguments: of each layer, as the model itself would pass them."""

    positions: Tensor
    arguments: Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class _CallingConvention:
    """How a model calls its layers: the varying arguments, and the form of results.

    batched: hidden states have a batch dimension. answers: number of values that a layer returns;
    the first one (with ``residual``, the first two) is passed on; 0 is a bare tensor.
    """

    hidden: str
    positions: str | None
    residual: str | None
    batched: bool
    answers: int


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
        self._convention = self._found_convention()
        self._constant = self._constant_arguments()

    def embed(self, token_ids: Tensor) -> Tensor:
        """Return the input of the first layer for tokens (rows,)."""
        return self._hidden_in(self._record_first(input_ids=token_ids))

    def output_of(self, hidden: Tensor) -> Tensor:
        """Return the model's output (rows, hidden) for its last layer's (1, rows, hidden)."""
        names = self._convention
        states = hidden if names.batched else hidden[0]
        parts = (states,) if names.residual is None else states.chunk(2, -1)
        rows = torch.zeros(hidden.shape[1], dtype=torch.long, device=hidden.device)

        def done(*_: Any, **__: Any) -> Any:
            copies = tuple(part.clone() for part in parts)
            more = (copies[0],) * (names.answers - len(copies))
            return (*copies, *more) if names.answers else copies[0]

        with (
            forwards_replaced(self._layers, lambda _: done),
            self._stand_ins.context(skip_compiled=True),
        ):
            return cast(Tensor, self.call_model(rows, rows))

    def position_inputs(self, positions: Tensor) -> PositionInputs:
        """Return the layers' arguments that depend on positions (rows,)."""
        arguments = self._constant or self.arguments(positions, self._geometry.dtype)
        return PositionInputs(positions, arguments)

    def given(self, layer: int, hidden: Tensor, inputs: PositionInputs) -> dict[str, Any]:
        """Return a layer's arguments for hidden states: copies, since fused norms work in place."""
        names = self._convention
        given = dict(inputs.arguments[layer])
        if self._constant is not None and names.positions is not None:
            given[names.positions] = inputs.positions[None] if names.batched else inputs.positions
        states = hidden if names.batched else hidden[0]
        if names.residual is None:
            return {**given, names.hidden: states.clone()}
        states, residual = (half.clone() for half in states.chunk(2, -1))
        return {**given, names.hidden: states, names.residual: residual if layer else None}

    def hidden_of(self, done: Any) -> Tensor:
        """Return a layer's output for the next layer, (1, rows, hidden)."""
        parts = done if isinstance(done, tuple) else (done,)
        states = parts[0] if self._convention.batched else parts[0][None]
        if self._convention.residual is None:
            return cast(Tensor, states)
        return _beside(states, parts[1])

    def arguments(self, positions: Tensor, dtype: torch.dtype) -> list[dict[str, Any]]:
        """Return the arguments of each layer for tokens at ``positions`` (rows,), by name."""
        recorded: list[dict[str, Any]] = []

        def record(layer: int) -> Callable[..., Any]:
            def forward(*given: Any, **named: Any) -> Any:
                recorded.append(self._bound(layer, given, named))
                if len(recorded) == len(self._layers):
                    raise RecordedError
                states = recorded[-1][self._convention.hidden]
                return (states,) * self._convention.answers if self._convention.answers else states

            return forward

        blank = torch.zeros(
            positions.numel(), self.hidden_size, dtype=dtype, device=positions.device
        )
        with forwards_replaced(self._layers, record):
            self._call_until_recorded(None, positions, blank)
        return recorded

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

    def _hidden_in(self, bound: Mapping[str, Any]) -> Tensor:
        """Return the hidden states among a layer's arguments, (1, rows, hidden)."""
        states: Tensor = bound[self._convention.hidden]
        states = states if self._convention.batched else states[None]
        if self._convention.residual is None:
            return states
        return _beside(states, bound[self._convention.residual])

    def _found_convention(self) -> _CallingConvention:
        """Record how the model calls its first layer, and what the layer returns."""
        positions = torch.arange(2, device=self._geometry.device)
        bound = self._record_first(positions=positions)
        tensors = {name: value for name, value in bound.items() if isinstance(value, Tensor)}
        hidden = [name for name, value in tensors.items() if value.is_floating_point()]
        if not hidden:
            raise UnsupportedModelError("its layers get no hidden state")
        where = [
            name for name, value in tensors.items() if value.data_ptr() == positions.data_ptr()
        ]
        with self._stand_ins.answering(0, _attend_to_nothing):
            done = self._layers[0](**bound)
        return _CallingConvention(
            hidden=hidden[0],
            positions=where[0] if where else None,
            residual="residual" if "residual" in bound else None,
            batched=tensors[hidden[0]].dim() == 3,
            answers=len(done) if isinstance(done, tuple) else 0,
        )

    def _constant_arguments(self) -> list[dict[str, Any]] | None:
        """Return the layers' constant arguments; None if they depend on positions."""
        positions = torch.arange(2, device=self._geometry.device)
        moving = {self._convention.hidden, self._convention.positions, self._convention.residual}
        found = [
            {name: value for name, value in handed.items() if name not in moving}
            for handed in self.arguments(positions, self._geometry.dtype)
        ]
        plain = (int, float, str, type(None))
        if all(isinstance(value, plain) for handed in found for value in handed.values()):
            return found
        return None

    def _record_first(
        self, input_ids: Tensor | None = None, positions: Tensor | None = None
    ) -> dict[str, Any]:
        """Return the arguments of the first layer, by name; one parameter must be given."""
        recorded: list[dict[str, Any]] = []

        def first(*given: Any, **named: Any) -> Any:
            recorded.append(self._bound(0, given, named))
            raise RecordedError

        known = positions if input_ids is None else input_ids
        assert known is not None  # noqa: S101 (one of the two is given)
        input_ids = torch.zeros_like(known) if input_ids is None else input_ids
        positions = torch.zeros_like(known) if positions is None else positions
        with forwards_replaced(self._layers[:1], lambda _: first):
            self._call_until_recorded(input_ids, positions, None)
        return recorded[0]

    def _call_until_recorded(
        self, input_ids: Tensor | None, positions: Tensor, embeds: Tensor | None
    ) -> None:
        try:
            with self._stand_ins.context(skip_compiled=True):
                self.call_model(input_ids, positions, embeds)
        except RecordedError:
            return
        raise UnsupportedModelError(
            f"{type(self._model).__name__} does not call its {len(self._layers)} layers in order"
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


def _attend_to_nothing(call: AttentionCall) -> Tensor:
    return torch.zeros_like(call.query).transpose(1, 2)


def _beside(states: Tensor, residual: Tensor | None) -> Tensor:
    """Concatenate a state and a residual: (1, rows, 2 x hidden)."""
    residual = torch.zeros_like(states) if residual is None else residual
    return torch.cat((states, residual.view_as(states)), -1)
