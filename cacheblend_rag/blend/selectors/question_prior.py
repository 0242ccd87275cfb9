"""Ranks tokens by the question's attention times the prior."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from cacheblend_rag.blend.selectors.base import Evidence, given
from cacheblend_rag.blend.selectors.question import Question


@dataclass(frozen=True)
class QuestionPrior(Question):
    """Question attention times prior. Source: this project's study."""

    needs_prior: ClassVar[bool] = True

    def score(self, evidence: Evidence) -> Tensor:
        return super().score(evidence) * given(evidence.prior, "prior")
