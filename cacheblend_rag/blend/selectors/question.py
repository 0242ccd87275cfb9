"""Ranks tokens by the question's attention to them, from a probe pass over the cached KV."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from cacheblend_rag.blend.selectors.base import Evidence, Selector, given
from cacheblend_rag.blend.selectors.probe import Heads, Probe, Tokens


@dataclass(frozen=True)
class Question(Selector):
    """Attention mass of the question; by default the most attentive head's, in the upper layers.

    span, layers, heads, tokens, draft: see Probe. Related: ProphetKV (arXiv 2602.02579);
    ``draft`` follows BCR (arXiv 2610.02233), which ranks by the attention of the answer's first
    tokens.
    """

    needs_question: ClassVar[bool] = True
    span: Sequence[float] = (0.5, 1.0)
    layers: Sequence[int] | None = None
    heads: Heads = "max"
    tokens: Tokens = "sum"
    draft: float = 0.0

    def __post_init__(self) -> None:
        _ = self.probe  # which checks the fields

    @property
    def probe(self) -> Probe:
        return Probe(self.span, self.layers, self.heads, self.tokens, self.draft)

    def score(self, evidence: Evidence) -> Tensor:
        return given(evidence.question_attention, "question_attention")
