"""Ranks tokens by how much their KV depends on the text before their chunk (index-time prior)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from cacheblend_rag.blend.selectors.base import Evidence, Selector, given


class Prior(Selector):
    """How much the chunk's document changed each token's key when the document was indexed.

    Stored with each chunk, so it costs nothing at question time. Source: this project's study.
    """

    needs_prior: ClassVar[bool] = True

    def score(self, evidence: Evidence) -> Tensor:
        return given(evidence.prior, "prior")
