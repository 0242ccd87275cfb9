"""Ranks tokens by the question's attention to them, from a probe pass over the cached KV."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from cacheblend_rag.blend.selectors.base import Evidence, Selector, given
from cacheblend_rag.blend.selectors.probe import Heads, Probe


@dataclass(frozen=True)
class Question(Selector):
    """Attention mass of the question, by default in middle layers, where its probe ends.

    span, layers, heads: see Probe. Related: QCFuse (arXiv 2606.05875), which scores by three middle
    layers chosen by measurement; ``layers`` names such layers of a model.
    """

    needs_question: ClassVar[bool] = True
    span: Sequence[float] = (0.4, 0.75)
    layers: Sequence[int] | None = None
    heads: Heads = "sum"

    def __post_init__(self) -> None:
        _ = self.probe  # which checks the fields

    @property
    def probe(self) -> Probe:
        return Probe(self.span, self.layers, self.heads)

    def score(self, evidence: Evidence) -> Tensor:
        return given(evidence.question_attention, "question_attention")
