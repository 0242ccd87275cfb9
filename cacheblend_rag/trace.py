"""The trace of a blend pass: chosen tokens, and deviations by layer.

A trace may come from a server, so its bounds are checked where it is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator, Field, FiniteFloat

from cacheblend_rag.settings.base import Count, Rising, rising

MOST_TOKENS = 4096
"""Most tokens traced per selection: those with the highest scores."""
MOST_SELECTIONS = 8
MOST_LAYERS = 1024


def _rising_layers(layers: tuple[TracedLayer, ...]) -> tuple[TracedLayer, ...]:
    rising(tuple(one.layer for one in layers))
    return layers


Layer = Annotated[int, Field(ge=0, lt=MOST_LAYERS)]
Positions = Annotated[tuple[Count, ...], Field(max_length=MOST_TOKENS), Rising]
Deviation = Annotated[FiniteFloat, Field(ge=0)]
"""Squared difference between the recomputed and the cached key, or value, of one token, summed over
heads and components."""


@dataclass(frozen=True)
class TracedTokens:
    """The deviations of single tokens in one layer.

    Args:
        layer: its index; None before layer 0.
        positions: of the tokens in the prompt, rising; the MOST_TOKENS with the highest deviations
            of values if there are more.
        key_deviations: one per token; empty before layer 0, where there is no fresh key.
        value_deviations: the same of values.

    Raises:
        ValueError: when its parts do not fit one another.
    """

    layer: Layer | None
    positions: Positions
    key_deviations: tuple[Deviation, ...] = ()
    value_deviations: tuple[Deviation, ...] = ()

    def __post_init__(self) -> None:
        lengths = {len(self.key_deviations), len(self.value_deviations)}
        if lengths not in ({0}, {len(self.positions)}):
            raise ValueError("must have two deviations for each token (key, value), or none")


@dataclass(frozen=True)
class TracedSelection(TracedTokens):
    """One choice of tokens that are recomputed from a layer on, the check layer.

    ``positions`` are of the tokens that a selector could choose, the MOST_TOKENS with the highest
    scores if there are more. Tokens that its rule excludes (a score of minus infinity) are left
    out.

    Args:
        scores: one per token.
        chosen: one per token: whether it is computed from here on.
    """

    scores: tuple[FiniteFloat, ...] = ()
    chosen: tuple[bool, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if {len(self.scores), len(self.chosen)} != {len(self.positions)}:
            raise ValueError("must have a score and a choice for each token")


@dataclass(frozen=True)
class Deviations:
    """Deviations of all recomputed tokens' keys, or values, in one layer.

    Args:
        mean: over tokens.
        median: over tokens; of two in the middle their mean.
        most: the largest.
        size: mean squared length of the tokens' fresh keys or values, to compare layers by.
    """

    mean: Deviation
    median: Deviation
    most: Deviation
    size: Deviation


@dataclass(frozen=True)
class TracedLayer:
    """How far fresh KV is from cached KV in one layer.

    Args:
        layer: its index.
        tokens: how many tokens with cached KV were recomputed there.
        keys: deviations of their keys.
        values: deviations of their values.
    """

    layer: Layer
    tokens: Annotated[int, Field(ge=1)]
    keys: Deviations
    values: Deviations


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
        tokens: the recomputed tokens of the first layer that compares them and whose values depend
            on other tokens; None if none does.
        protected: positions of tokens with cached KV that may not be recomputed, rising; at most
            MOST_TOKENS.
    """

    selections: Annotated[tuple[TracedSelection, ...], Field(max_length=MOST_SELECTIONS)] = ()
    rows: Annotated[tuple[Count, ...], Field(max_length=MOST_LAYERS)] = ()
    truncated: bool = False
    layers: Annotated[
        tuple[TracedLayer, ...], Field(max_length=MOST_LAYERS), AfterValidator(_rising_layers)
    ] = ()
    tokens: TracedTokens | None = None
    protected: Positions = ()

    def fits(self, tokens: int) -> bool:
        """Whether it is possible for a prompt of so many tokens."""
        listed = [self.protected, *(one.positions for one in self.selections)]
        listed += [] if self.tokens is None else [self.tokens.positions]
        ends = (positions[-1] for positions in listed if positions)
        counts = (one.tokens for one in self.layers)
        return max((*ends, -1)) < tokens and max((*self.rows, *counts, 0)) <= tokens
