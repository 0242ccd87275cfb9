"""Ranks tokens by the question's attention times the prior."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from cacheblend_rag.blend.selectors.base import Evidence, Selector, given


@dataclass(frozen=True)
class QuestionPrior(Selector):
    """Question attention times prior. Source: this project's study."""

    needs_question: ClassVar[bool] = True
    needs_prior: ClassVar[bool] = True

    def score(self, evidence: Evidence) -> Tensor:
        attention = given(evidence.question_attention, "question_attention")
        return attention * given(evidence.prior, "prior")
