"""Floating-point work of layers and passes, so that savings are quoted with their real cost."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class LayerCost:
    """Work of one layer, in floating-point operations.

    per_row: all matrix products of the layer for one token. per_row_probe: those up to query, key
    and value only. per_pair: attention for one query and one key, all heads. window: keys a query
    can see at most, or None.
    """

    per_row: float
    per_row_probe: float
    per_pair: float
    window: int | None = None

    def run(self, rows: Tensor) -> float:
        """Work of running the layer on rows at these positions ((rows,) int64)."""
        return self.per_row * rows.numel() + self.per_pair * self._pairs(rows)

    def probe(self, rows: int) -> float:
        """Work of computing query, key and value for so many rows."""
        return self.per_row_probe * rows

    def _pairs(self, rows: Tensor) -> float:
        seen = rows + 1
        return float((seen if self.window is None else seen.clamp(max=self.window)).sum())


def prefill_cost(costs: tuple[LayerCost, ...], tokens: int) -> float:
    """Work of ordinary prefill of ``tokens`` tokens through all layers."""
    return sum(
        cost.per_row * tokens + cost.per_pair * _causal_pairs(tokens, cost.window) for cost in costs
    )


def _causal_pairs(tokens: int, window: int | None) -> float:
    if window is None or window >= tokens:
        return tokens * (tokens + 1) / 2
    return window * (window + 1) / 2 + (tokens - window) * window
