"""Draws by Zipf's law."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate


def zipf_weights(count: int, exponent: float) -> list[float]:
    """Return the cumulative weights of so many ranks by Zipf's law, for ``draw_ranks``."""
    return [*accumulate(1 / rank**exponent for rank in range(1, count + 1))]


def draw_ranks(rng: random.Random, weights: Sequence[float], count: int) -> tuple[int, ...]:
    """Return distinct ranks from 0 on, in the order in which they were drawn."""
    found: dict[int, None] = {}
    while len(found) < count:
        found[rng.choices(range(len(weights)), cum_weights=weights)[0]] = None
    return tuple(found)
