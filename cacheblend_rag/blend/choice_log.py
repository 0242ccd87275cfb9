"""Logs each choice of rows at DEBUG: how many tokens, and the range of their deviation."""

from __future__ import annotations

import logging

import numpy as np
from torch import Tensor

from cacheblend_rag.blend.rows import Positions
from cacheblend_rag.blend.selectors import Selector
from cacheblend_rag.blend.selectors.hkvd import HKVD

logger = logging.getLogger(__name__)


def log_choice(
    request_id: str,
    layer: int | None,
    selector: Selector,
    candidates: Positions,
    scores: Tensor,
    *,
    chosen: Positions,
) -> None:
    """Log a choice, without any token or text.

    layer: where they were chosen, None before layer 0. scores: of the candidates, on the host
    already, so nothing is read back from a device; HKVD's are deviations.
    """
    if not logger.isEnabledFor(logging.DEBUG):
        return
    best = scores.numpy()[np.isin(candidates, chosen, assume_unique=True)]
    kind = "deviation" if isinstance(selector, HKVD) else "score"
    logger.debug(
        "request %s: %s: %d of %d tokens chosen%s",
        request_id or "-",
        "before layer 0" if layer is None else f"layer {layer}",
        len(chosen),
        len(candidates),
        f", {kind} {best.min():.4g} - {best.max():.4g}" if best.size else "",
    )
