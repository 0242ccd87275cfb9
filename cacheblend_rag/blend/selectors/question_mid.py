"""Ranks tokens by the question's attention in middle layers, from a probe of part of the depth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cacheblend_rag.blend.selectors.probe import Heads
from cacheblend_rag.blend.selectors.question import Question


@dataclass(frozen=True)
class QuestionMid(Question):
    """As ``question``, over fewer layers: the probe ends there, so it costs and reads less.

    Related: QCFuse (arXiv 2606.05875), which scores by three middle layers chosen by measurement;
    ``layers`` names such layers of a model.
    """

    span: Sequence[float] = (0.4, 0.75)
    heads: Heads = "sum"
