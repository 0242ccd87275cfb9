"""Observer: sees what a blend pass does, as it does it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from cacheblend_rag.blend.rows import Positions, Rows
from cacheblend_rag.blend.stack import AttentionCall


@dataclass(frozen=True)
class Selection:
    """What a selector was asked once, and what it chose.

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
    """Base class: nothing is done about anything; a subclass overrides what it wants to see.

    All ranks of a pass need observers of the same kinds.
    """

    def attended(self, call: AttentionCall, rows: Rows, keys: Tensor) -> None:
        """See an attention call, its rows, and the layer's fused keys, before it is computed."""

    def computed(self, layer: int, rows: Rows) -> None:
        """See the rows whose fresh KV a layer has computed."""

    def selected(self, selection: Selection) -> None:
        """See a choice of rows."""
