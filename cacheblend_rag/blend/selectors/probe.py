"""Describes a question's probe pass: which layers are observed, and how attention is summed up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, get_args

from cacheblend_rag.errors import ConfigError

Heads = Literal["sum", "max"]


@dataclass(frozen=True)
class Probe:
    """The attention of a question's tokens that a probe pass measures.

    Sums rank tokens as means do. The pass ends after the last observed layer.

    Args:
        span: observed layers, from and to as fractions of the depth: the layer at the first
            fraction is included, the one at the second is not.
        layers: indices of the observed layers, instead of ``span``; None is the span.
        heads: ``sum`` adds up heads; ``max`` takes the largest, after the question's tokens.

    Raises:
        ConfigError: when a field is out of range.
    """

    span: Sequence[float] = (0.4, 0.75)
    layers: Sequence[int] | None = None
    heads: Heads = "sum"

    def __post_init__(self) -> None:
        if not _is_span(self.span):
            raise ConfigError(f"span={self.span!r} must be two rising fractions from 0 to 1")
        if self.layers is not None and not _are_indices(self.layers):
            raise ConfigError(f"layers={self.layers!r} must be rising layer indices, at least one")
        if self.heads not in get_args(Heads):
            raise ConfigError(f"heads={self.heads!r} must be one of {', '.join(get_args(Heads))}")

    def observed(self, layers: int) -> tuple[int, ...]:
        """Return the observed layers of a model of ``layers`` layers, rising, at least one.

        Raises ConfigError when one is not below ``layers``.
        """
        if self.layers is not None:
            if self.layers[-1] >= layers:
                raise ConfigError(f"layers={self.layers} must be below the model's {layers} layers")
            return tuple(self.layers)
        first, end = (math.floor(share * layers + 1e-9) for share in self.span)
        first = min(first, layers - 1)
        return tuple(range(first, max(end, first + 1)))

    def depth(self, layers: int) -> int:
        """Return how many of a model's first layers the probe pass needs."""
        return self.observed(layers)[-1] + 1


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_span(span: Any) -> bool:
    if not isinstance(span, tuple | list) or len(span) != 2 or not all(map(_is_number, span)):
        return False
    return bool(0 <= span[0] < span[1] <= 1)


def _are_indices(layers: Any) -> bool:
    if not isinstance(layers, tuple | list) or not layers:
        return False
    rises = all(type(layer) is int for layer in layers) and all(a < b for a, b in pairwise(layers))
    return rises and layers[0] >= 0
