"""Counts the floating-point operations of layers and passes, and estimates those of a pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cacheblend_rag.blend.rows import Mask, Rows
from cacheblend_rag.blend.schedule import Schedule


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


@dataclass(frozen=True)
class _RowCount:
    """The number of rows, and how many keys they see in total, by the layer's window."""

    count: float
    pairs: dict[int | None, float]

    @classmethod
    def where(cls, mask: Mask, windows: set[int | None]) -> _RowCount:
        seen = np.flatnonzero(mask) + 1
        pairs = {
            window: float((seen if window is None else np.minimum(seen, window)).sum())
            for window in windows
        }
        return cls(float(len(seen)), pairs)

    def with_share(self, share: float, others: _RowCount) -> _RowCount:
        """Return these rows and a share of others."""
        pairs = {window: own + share * others.pairs[window] for window, own in self.pairs.items()}
        return _RowCount(self.count + share * others.count, pairs)

    def run(self, cost: LayerCost) -> float:
        """Return the floating-point operations of running one layer on the rows."""
        return cost.per_row * self.count + cost.per_pair * self.pairs[cost.window]


class Forecast:
    """The estimated work of passes over one prompt, for any schedule.

    The rows that a selector will choose are not known yet, so all are taken as equally likely:
    their number is the most that the schedule allows, the number of keys they attend to is an
    average. Measuring the question's attention is not included.

    Args:
        costs: of each layer.
        cached: (tokens,) bool, tokens that have cached KV.
        eligible: (tokens,) bool, those of them that may be recomputed.
        needs_hidden: whether the last token's hidden state is needed.
    """

    def __init__(
        self,
        costs: Sequence[LayerCost],
        cached: Mask,
        eligible: Mask,
        *,
        needs_hidden: bool = True,
    ) -> None:
        always, last = ~cached, np.zeros_like(cached)
        last[-1] = needs_hidden
        always |= last
        windows = {cost.window for cost in costs}
        self._costs, self._needs_hidden = costs, needs_hidden
        self._eligible = float(eligible.sum())
        self._always = _RowCount.where(always, windows)
        self._free = _RowCount.where(eligible & ~always, windows)
        self._last = _RowCount.where(last, windows)

    def work(self, schedule: Schedule) -> float:
        """Return the work, in floating-point operations, that BlendPass would count."""
        rows = self._rows(1.0 if schedule.before is None else self._share(schedule.before))
        work, last = 0.0, len(self._costs) - 1
        for layer, cost in enumerate(self._costs):
            if layer in schedule.checks:
                work += cost.per_row_probe * rows.count
                rows = self._rows(self._share(schedule.checks[layer]))
            if layer < last:
                work += rows.run(cost)
            elif not (self._needs_hidden and rows.count == 1):
                work += cost.per_row_probe * rows.count
        return work + (self._last.run(self._costs[last]) if self._needs_hidden else 0.0)

    def _rows(self, share: float) -> _RowCount:
        return self._always.with_share(share, self._free)

    def _share(self, ratio: float) -> float:
        """Return the share of the free rows to choose for a ratio of all eligible tokens."""
        return min(1.0, ratio * self._eligible / max(self._free.count, 1.0))
