"""The base class of observers of a blend pass."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from cacheblend_rag.blend.fused import FusedKV
from cacheblend_rag.blend.rows import Positions, Rows
from cacheblend_rag.blend.stack import AttentionCall


@dataclass(frozen=True)
class Selection:
    """One choice of a selector, and its input.

    layer: the check layer, None before layer 0. positions: (candidates,) in the prompt, rising.
    scores: (candidates,) float32, on the host. chosen: the positions among them that are computed
    from there on. key_deviations, value_deviations: (candidates,) float32, squared differences of
    fresh KV from cached KV, summed over all ranks' heads and over components; None before layer 0.
    """

    layer: int | None
    positions: Positions
    scores: Tensor
    chosen: Positions
    key_deviations: Tensor | None = None
    value_deviations: Tensor | None = None


class Observer:
    """Ignores everything; a subclass overrides the methods of the events that it needs.

    All ranks of a pass need observers of the same kinds.
    """

    def watches(self, layer: int) -> bool:
        """Return whether a layer's attention or the KV that it replaces is of interest."""
        return True

    def attended(self, call: AttentionCall, rows: Rows, keys: Tensor) -> None:
        """Called before attention is computed, with its call, rows, and the layer's fused keys."""

    def replacing(
        self, layer: int, rows: Rows, keys: Tensor, values: Tensor, fused: FusedKV
    ) -> None:
        """Called before rows' fresh KV (1, kv_heads, rows, head_dim) replaces what is in ``fused``.

        Once per layer and row, in blocks of rows.
        """

    def computed(self, layer: int, rows: Rows) -> None:
        """Called with the rows whose fresh KV a layer has computed."""

    def selected(self, selection: Selection) -> None:
        """Called with a choice of rows."""
