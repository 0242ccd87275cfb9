"""Trace: which tokens a blend pass recomputed, by what scores, layer by layer; bounded."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

MOST_TOKENS = 4096
"""Tokens of one selection that are traced at most: those with the highest scores."""
MOST_SELECTIONS = 8
MOST_LAYERS = 1024


@dataclass(frozen=True)
class TracedSelection:
    """One choice of the tokens that are recomputed from a layer on.

    Args:
        layer: the check layer at which it was made; None before layer 0.
        positions: in the prompt, rising, of the tokens that a selector could choose. Those that its
            rule leaves out (a score of minus infinity) are not among them.
        scores: one a token.
        chosen: one a token: whether it goes on being computed.
        key_deviations: one a token: squared difference of its fresh key from its cached key at the
            layer, summed over heads and components; empty before layer 0, where none is fresh.
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
            raise ValueError("a selection holds what is no number")


@dataclass(frozen=True)
class Trace:
    """What a blend pass chose, and what it recomputed.

    Args:
        selections: the choices, in order; none where everything or nothing was to be recomputed.
        rows: by layer, how many tokens that had cached KV were computed afresh there. A check layer
            computes all that it chooses from.
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
            raise ValueError("a trace counts less than no rows")

    def fits(self, tokens: int) -> bool:
        """Whether it can be of a prompt of so many tokens."""
        ends = (one.positions[-1] for one in self.selections if one.positions)
        return max((*ends, -1)) < tokens and max((*self.rows, 0)) <= tokens
