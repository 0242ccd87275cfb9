"""Counts the floating-point operations of layers and passes."""

from __future__ import annotations

from dataclasses import dataclass

from cacheblend_rag.blend.rows import Rows


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
