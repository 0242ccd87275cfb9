"""Ranks tokens by the question's attention to them, from a probe pass over the cached KV."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from cacheblend_rag.blend.selectors.base import Evidence, Selector, given


@dataclass(frozen=True)
class Question(Selector):
    """Attention mass of the question. Related: ProphetKV (arXiv 2602.02579)."""

    needs_question: ClassVar[bool] = True

    def score(self, evidence: Evidence) -> Tensor:
        return given(evidence.question_attention, "question_attention")
