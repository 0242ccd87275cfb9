"""The base class of observers of a blend pass."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from cacheblend_rag.blend.fused import FusedKV
from cacheblend_rag.blend.rows import Positions, Rows
from cacheblend_rag.blend.selectors import Evidence, Selector
from cacheblend_rag.blend.stack import AttentionCall

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Selection:
    """The tokens that a selector chose to recompute, with the scores that it chose them by.

    layer: the check layer, None before layer 0. positions: (candidates,) in the prompt, rising.
    evidence: of the candidates. scores: (candidates,) float32, on the host. chosen: the positions
    among them that are computed from there on.
    """

    layer: int | None
    positions: Positions
    evidence: Evidence
    scores: Tensor
    chosen: Positions

    def log(self, request_id: str, selector: Selector) -> None:
        """Log, at DEBUG, how many tokens were selected and their scores' range; never the text."""
        if not logger.isEnabledFor(logging.DEBUG):
            return
        best = self.scores.numpy()[np.isin(self.positions, self.chosen, assume_unique=True)]
        kind = "deviation" if selector.needs_fresh_kv else "score"
        logger.debug(
            "request %s: %s: %d of %d tokens chosen%s",
            request_id or "-",
            "before layer 0" if self.layer is None else f"layer {self.layer}",
            len(self.chosen),
            len(self.positions),
            f", {kind} {best.min():.4g} - {best.max():.4g}" if best.size else "",
        )


class Observer:
    """Ignores everything; a subclass overrides the methods of the events that it needs.

    All ranks of a pass need observers of the same kind.
    """

    def watches(self, layer: int) -> bool:
        """Return whether a layer's attention or the KV that it replaces is of interest."""
        return False

    def selected(self, selection: Selection) -> None:
        """Called when a selector has chosen the tokens to recompute."""

    def replacing(self, call: AttentionCall, rows: Rows, fused: FusedKV) -> None:
        """Called before rows' fresh KV replaces what is in ``fused``; once per layer and row."""

    def attended(self, call: AttentionCall, rows: Rows, fused: FusedKV) -> None:
        """Called with the inputs of rows' attention, once their fresh KV is in ``fused``."""
