"""Ranks tokens by the deviation of their fresh KV from the cached KV at the check layer (HKVD)."""

from __future__ import annotations

from typing import ClassVar, Literal

from torch import Tensor

from cacheblend_rag.blend.selectors.base import Evidence, Selector


class HKVD(Selector):
    """Squared deviation of V or K. Source: CacheBlend (arXiv 2405.16444)."""

    needs_fresh_kv: ClassVar[bool] = True
    deviation: Literal["v", "k"] = "v"

    def score(self, evidence: Evidence) -> Tensor:
        return evidence.deviation(self.deviation)
