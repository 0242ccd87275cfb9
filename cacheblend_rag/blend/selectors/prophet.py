"""Ranks tokens by the question's mean attention in all layers (ProphetKV)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cacheblend_rag.blend.selectors.probe import Heads
from cacheblend_rag.blend.selectors.question import Question


@dataclass(frozen=True)
class Prophet(Question):
    """Attention over the question's tokens, all heads and all layers. Source: arXiv 2602.02579."""

    span: Sequence[float] = (0.0, 1.0)
    heads: Heads = "sum"
