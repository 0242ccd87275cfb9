"""The trace of a blend pass: the chosen tokens and their scores, layer by layer; bounded."""

from __future__ import annotations

import math
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
        if any(b <= a for a, b in pairwise((-1, *self.positions))):
            raise ValueError("positions of a selection must rise")
        numbers = (*self.scores, *self.key_deviations, *self.value_deviations)
        if not all(map(math.isfinite, numbers)):
            raise ValueError("a selection holds NaN or infinity")


@dataclass(frozen=True)
class Trace:
    """The choices of a blend pass, and how much it recomputed.

    Args:
        selections: the choices, in order; empty if everything or nothing was to be recomputed.
        rows: per layer, how many tokens with cached KV were recomputed there. A check layer
            computes all tokens that it chooses from.
        truncated: whether something is left out: tokens of a selection beyond the MOST_TOKENS of
            the highest scores, or selections beyond MOST_SELECTIONS.

    Raises:
        ValueError: when it is longer than that.
    """

    selections: tuple[TracedSelection, ...] = ()
    rows: tuple[int, ...] = ()
    truncated: bool = False

    def __post_init__(self) -> None:
        if len(self.selections) > MOST_SELECTIONS or len(self.rows) > MOST_LAYERS:
            raise ValueError(f"a trace of {len(self.selections)} selections, {len(self.rows)} rows")
        if any(count < 0 for count in self.rows):
            raise ValueError("a trace has a negative number of rows")

    def fits(self, tokens: int) -> bool:
        """Whether it is possible for a prompt of so many tokens."""
        ends = (one.positions[-1] for one in self.selections if one.positions)
        return max((*ends, -1)) < tokens and max((*self.rows, 0)) <= tokens
