"""Counts the floating-point operations of layers and passes, and estimates those of a pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cacheblend_rag.blend.rows import Mask, Rows
from cacheblend_rag.blend.schedule import REUSE_ONLY, Schedule


@dataclass(frozen=True, slots=True)
class LayerCost:
    """Work of one layer, in floating-point operations.

    per_row: all matrix products of the layer for one token. per_row_probe: only those for query,
    key and value. per_pair: attention for one query and one key, all heads. window: keys a query
    can see at most, or None.
    """

    per_row: float
    per_row_probe: float
    per_pair: float
    window: int | None = None

    def run(self, rows: Rows) -> float:
        """Work of running the layer on these rows."""
        return self.per_row * len(rows) + self.per_pair * rows.pairs(self.window)

    def probe(self, rows: int) -> float:
        """Work of computing query, key and value for so many rows."""
        return self.per_row_probe * rows


def prefill_cost(costs: tuple[LayerCost, ...], tokens: int) -> float:
    """Work of ordinary prefill of ``tokens`` tokens through all layers."""
    return sum(
        cost.per_row * tokens + cost.per_pair * _causal_pairs(tokens, cost.window) for cost in costs
    )


def _causal_pairs(tokens: int, window: int | None) -> float:
    if window is None or window >= tokens:
        return tokens * (tokens + 1) / 2
    return window * (window + 1) / 2 + (tokens - window) * window


class Forecast:
    """The estimated work of passes over one prompt, for any schedule.

    The rows that a selector will choose are not known yet, so all are taken as equally likely:
    their number is the most that the schedule allows, the number of keys they attend to is an
    average.

    Args:
        costs: of each layer.
        cached: (tokens,) bool, tokens that have cached KV.
        eligible: (tokens,) bool, those of them that may be recomputed.
    """

    def __init__(self, costs: Sequence[LayerCost], cached: Mask, eligible: Mask) -> None:
        always = ~cached
        always[-1] = True  # its hidden state is needed
        self._costs, self._eligible = costs, float(eligible.sum())
        self._always, self._free = always.astype(float), (eligible & ~always).astype(float)
        positions = np.arange(1, len(cached) + 1)
        windows = {cost.window for cost in costs}
        self._seen = {
            window: positions if window is None else np.minimum(positions, window)
            for window in windows
        }

    def work(self, schedule: Schedule) -> float:
        """Return the work, in floating-point operations, of a pass and of the probe before it."""
        probe = self._costs[: schedule.probed(len(self._costs)) if self._eligible else 0]
        return self._pass(probe, REUSE_ONLY) + self._pass(self._costs, schedule)

    def _pass(self, costs: Sequence[LayerCost], schedule: Schedule) -> float:
        rows = self._rows(self._share(schedule.before))
        work, last = 0.0, len(costs) - 1
        for layer, cost in enumerate(costs):
            if layer in schedule.checks:
                work += cost.per_row_probe * rows.sum()
                rows = self._rows(self._share(schedule.checks[layer]))
            seen = self._seen[cost.window]
            if layer < last:
                work += cost.per_row * rows.sum() + cost.per_pair * (rows @ seen)
            else:  # which only the last token runs through
                work += cost.per_row_probe * (rows.sum() - 1)
                work += cost.per_row + cost.per_pair * seen[-1]
        return float(work)

    def _rows(self, share: float) -> NDArray[np.float64]:
        """Return how likely each token is a row if this share of the free ones is chosen."""
        return self._always + share * self._free

    def _share(self, ratio: float) -> float:
        """Return the share of the free rows to choose for a ratio of all eligible tokens."""
        return min(1.0, ratio * self._eligible / max(float(self._free.sum()), 1.0))
