"""Ranks tokens by the question's attention in middle layers, from a probe of part of the depth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cacheblend_rag.blend.selectors.probe import Heads
from cacheblend_rag.blend.selectors.question import Question


@dataclass(frozen=True)
class QuestionMid(Question):
    """As ``question``, over fewer layers: the probe ends there, so it costs and reads less.

    ``layers``, found by ``python -m tests.benchmarks.profile_layers``, names a model's best ones.
    Related: QCFuse (arXiv 2606.05875), which scores by three profiled middle layers.
    """

    span: Sequence[float] = (0.4, 0.6)
    heads: Heads = "sum"
