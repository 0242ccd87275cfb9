"""The trace of a blend pass: chosen tokens, deviations; bounded."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

MOST_TOKENS = 4096
"""Most tokens traced per selection: those with the highest scores."""
MOST_SELECTIONS = 8
MOST_LAYERS = 1024


@dataclass(frozen=True)
class TracedSelection:
    """One choice of tokens that are recomputed from a layer on.

    Args:
        layer: the check layer at which it was made; None before layer 0.
        positions: in the prompt, rising, of the tokens that a selector could choose. Tokens that
            its rule excludes (a score of minus infinity) are left out.
        scores: one per token.
        chosen: one per token: whether it is computed from here on.
        key_deviations: one per token: squared difference of its fresh key from its cached key at
            the layer, summed over heads and components; empty before layer 0, where there is no
            fresh key.
        value_deviations: the same of its value.

    Raises:
        ValueError: when it is longer than MOST_TOKENS, or its parts do not fit one another.
    """

    layer: int | None
    positions: tuple[int, ...]
    scores: tuple[float, ...]
    chosen: tuple[bool, ...]
    key_deviations: tuple[float, ...] = ()
    value_deviations: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        count = len(self.positions)
        if count > MOST_TOKENS:
            raise ValueError(f"a selection of {count} tokens is longer than {MOST_TOKENS}")
        if self.layer is not None and not 0 <= self.layer < MOST_LAYERS:
            raise ValueError(f"layer={self.layer} of a selection")
        if {len(self.scores), len(self.chosen)} != {count}:
            raise ValueError("a selection needs a score and a choice for each token")
        deviations = len(self.key_deviations)
        if deviations not in {0, count} or len(self.value_deviations) != deviations:
            raise ValueError("a selection needs two deviations for each token, or none")
        _check_rising(self.positions, "a selection")
        _check_finite((*self.scores, *self.key_deviations, *self.value_deviations), "a selection")


@dataclass(frozen=True)
class Deviations:
    """Squared differences of tokens' fresh KV from their cached KV, in one layer and one of K, V.

    They are summed over heads and components, before the fresh KV replaces the cached KV.

    Args:
        mean: over tokens.
        median: over tokens; of two in the middle their mean.
        most: the largest.
        size: mean squared length of the tokens' fresh keys or values, to compare layers by.

    Raises:
        ValueError: when a number is not finite, or below 0.
    """

    mean: float
    median: float
    most: float
    size: float

    def __post_init__(self) -> None:
        _check_finite((self.mean, self.median, self.most, self.size), "a layer", least=0.0)


@dataclass(frozen=True)
class TracedLayer:
    """How far fresh KV is from cached KV in one layer.

    Args:
        layer: its index.
        tokens: how many tokens with cached KV were recomputed there.
        keys: deviations of their keys.
        values: deviations of their values.

    Raises:
        ValueError: for a layer that cannot be, or without tokens.
    """

    layer: int
    tokens: int
    keys: Deviations
    values: Deviations

    def __post_init__(self) -> None:
        _check_layer(self.layer, "a layer")
        if self.tokens < 1:
            raise ValueError(f"tokens={self.tokens} of a layer")


@dataclass(frozen=True)
class TracedTokens:
    """The deviations of single recomputed tokens in one layer, as in ``Deviations``.

    Args:
        layer: its index.
        positions: of the tokens in the prompt, rising; the MOST_TOKENS with the highest deviations
            of values if there are more.
        key_deviations: one per token.
        value_deviations: one per token.

    Raises:
        ValueError: when it is longer than MOST_TOKENS, or its parts do not fit one another.
    """

    layer: int
    positions: tuple[int, ...]
    key_deviations: tuple[float, ...]
    value_deviations: tuple[float, ...]

    def __post_init__(self) -> None:
        _check_layer(self.layer, "tokens")
        count = len(self.positions)
        if count > MOST_TOKENS:
            raise ValueError(f"{count} tokens of a layer are more than {MOST_TOKENS}")
        if {len(self.key_deviations), len(self.value_deviations)} != {count}:
            raise ValueError("tokens of a layer need two deviations each")
        _check_rising(self.positions, "tokens")
        _check_finite((*self.key_deviations, *self.value_deviations), "tokens", least=0.0)


@dataclass(frozen=True)
class Trace:
    """What a blend pass chose, how much it recomputed, and what that changed.

    Args:
        selections: the choices, in order; empty if everything or nothing was to be recomputed.
        rows: per layer, how many tokens with cached KV were recomputed there. A check layer
            computes all tokens that it chooses from.
        truncated: whether something is left out: tokens beyond MOST_TOKENS, selections beyond
            MOST_SELECTIONS, layers beyond MOST_LAYERS.
        layers: the layers that recomputed tokens with cached KV, in order.
        tokens: deviations of single tokens in the first layer that compares them and whose values
            depend on other tokens; None if none does.
        protected: positions of tokens with cached KV that may not be recomputed, rising; at most
            MOST_TOKENS.

    Raises:
        ValueError: when it is longer than that, or out of order.
    """

    selections: tuple[TracedSelection, ...] = ()
    rows: tuple[int, ...] = ()
    truncated: bool = False
    layers: tuple[TracedLayer, ...] = ()
    tokens: TracedTokens | None = None
    protected: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if len(self.selections) > MOST_SELECTIONS or len(self.rows) > MOST_LAYERS:
            raise ValueError(f"a trace of {len(self.selections)} selections, {len(self.rows)} rows")
        if any(count < 0 for count in self.rows):
            raise ValueError("a trace has a negative number of rows")
        if len(self.layers) > MOST_LAYERS:
            raise ValueError(f"a trace of {len(self.layers)} layers")
        _check_rising([one.layer for one in self.layers], "layers")
        if len(self.protected) > MOST_TOKENS:
            raise ValueError(f"{len(self.protected)} protected tokens are more than {MOST_TOKENS}")
        _check_rising(self.protected, "protected tokens")

    def fits(self, tokens: int) -> bool:
        """Whether it is possible for a prompt of so many tokens."""
        listed = [self.protected, *(one.positions for one in self.selections)]
        listed += [] if self.tokens is None else [self.tokens.positions]
        ends = (positions[-1] for positions in listed if positions)
        counts = (one.tokens for one in self.layers)
        return max((*ends, -1)) < tokens and max((*self.rows, *counts, 0)) <= tokens


def _check_rising(positions: Sequence[int], where: str) -> None:
    if any(b <= a for a, b in pairwise((-1, *positions))):
        raise ValueError(f"positions of {where} must rise")


def _check_finite(numbers: Iterable[float], where: str, least: float = -math.inf) -> None:
    for number in numbers:
        if not math.isfinite(number):
            raise ValueError(f"{where} holds NaN or infinity")
        if number < least:
            raise ValueError(f"{where} holds {number}, which is below {least:g}")


def _check_layer(layer: int, where: str) -> None:
    if not 0 <= layer < MOST_LAYERS:
        raise ValueError(f"layer={layer} of {where}")
