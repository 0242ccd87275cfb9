"""Stacks that drive a model's layers wrongly in one thing, as an engine with a fault would.

The model itself is as it should be: each fault is in force only where the trial drives layers, so
that the trial must see it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from cacheblend_rag.blend.rotary import Table
from cacheblend_rag.blend.stack import Attend
from cacheblend_rag.engines.transformers.stack import TransformersStack


class OffByOne(TransformersStack):
    """Rows stand one position further on than they should."""

    def position_inputs(self, positions: Tensor) -> Any:
        return super().position_inputs(positions + 1)


class Mirrored(TransformersStack):
    """Queries and keys are turned the wrong way."""

    def position_inputs(self, positions: Tensor) -> Any:
        return super().position_inputs(-positions)


class TurnedTooFar(TransformersStack):
    """Keys are moved by one position too many."""

    def tables(self, offset: int) -> list[Table | None]:
        return super().tables(offset + 1)


class ShortWindow(TransformersStack):
    """Sliding windows are one token short; without any, rows see all but the first token."""

    shorter = 1
    behind = 24 + 23
    """Tokens before the trial's last one, where a model has no window."""

    @property
    def windows(self) -> Sequence[int | None]:
        if not self._windows[0] and not any(self._windows):
            self._windows = (self.behind,) * len(self._windows)
        return self._windows

    def run_layer(self, layer: int, hidden: Tensor, position_inputs: Any, attend: Attend) -> Tensor:
        own = self._windows
        if any(own) and self.behind not in own:
            self._windows = tuple(window and window - self.shorter for window in own)
        try:
            return super().run_layer(layer, hidden, position_inputs, attend)
        finally:
            self._windows = own


class Altered(TransformersStack):
    """One layer's weights are others while it is driven. layer: which one, from the end."""

    layer = -1

    def run_layer(self, layer: int, hidden: Tensor, position_inputs: Any, attend: Attend) -> Tensor:
        if layer != len(self.layers) + self.layer:
            return super().run_layer(layer, hidden, position_inputs, attend)
        with self._altered(self.layers[layer]):
            return super().run_layer(layer, hidden, position_inputs, attend)

    @contextmanager
    def _altered(self, module: nn.Module) -> Iterator[None]:
        weights = {name: weight.data for name, weight in module.named_parameters()}
        try:
            for name, weight in module.named_parameters():
                weight.data = self.alter(name, weight.data)
            yield
        finally:
            for name, weight in module.named_parameters():
                weight.data = weights[name]

    def alter(self, name: str, weight: Tensor) -> Tensor:
        """Return what stands in a weight's place."""
        raise NotImplementedError


class TenPercent(Altered):
    """The weights of a layer's values are ten percent too large."""

    def alter(self, name: str, weight: Tensor) -> Tensor:
        return (weight.float() * 1.1).to(weight.dtype) if "v_proj" in name else weight


class LeftOut(Altered):
    """The weights of a layer's first norm are left out."""

    def alter(self, name: str, weight: Tensor) -> Tensor:
        if "input_layernorm" not in name:
            return weight
        centred = "Gemma" in type(self.model).__name__  # there, 1 is added to the weights
        return torch.zeros_like(weight) if centred else torch.ones_like(weight)


FAULTS: dict[str, type[TransformersStack]] = {
    "rotary off by one": OffByOne,
    "rotary of the wrong sign": Mirrored,
    "keys turned too far": TurnedTooFar,
    "window one short": ShortWindow,
    "ten percent of one layer": TenPercent,
    "norm left out of one layer": LeftOut,
}
