"""Spearman's rank correlation."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray


def rank_correlation(ones: ArrayLike, others: ArrayLike) -> float | None:
    """Return how alike two lists of numbers, (items,), order their items: from -1 to 1.

    Equal numbers share the mean of their ranks. None for fewer than three items, or if one list
    holds only equal numbers: then there is no order.
    """
    first, second = (_ranks(np.asarray(one, np.float64)) for one in (ones, others))
    if len(first) < 3:
        return None
    first, second = first - first.mean(), second - second.mean()
    scale = float(np.sqrt((first @ first) * (second @ second)))
    return None if scale == 0 else min(1.0, max(-1.0, float(first @ second) / scale))


def _ranks(numbers: NDArray[np.float64]) -> NDArray[np.float64]:
    _, inverse, counts = np.unique(numbers, return_inverse=True, return_counts=True)
    ends = counts.cumsum()
    ranks: NDArray[np.float64] = (ends - (counts - 1) / 2)[inverse]
    return ranks
