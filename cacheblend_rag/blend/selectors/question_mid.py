"""Ranks tokens by the question's attention in middle layers, where it is asked without chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cacheblend_rag.blend.selectors.probe import Heads
from cacheblend_rag.blend.selectors.question import Question


@dataclass(frozen=True)
class QuestionMid(Question):
    """As ``question``, in few layers, by a question that has not seen the chunks.

    In a model that has layers with a sliding window it has, see ``Probe.on``. Elsewhere the probe
    takes chunk KV of these layers only, and ends there. Related: QCFuse (arXiv
    2606.05875), which scores by three middle layers chosen by measurement; ``layers`` names such
    layers of a model.
    """

    span: Sequence[float] = (0.4, 0.5)
    heads: Heads = "sum"
    alone: bool = True
