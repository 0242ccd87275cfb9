"""Recomputes all tokens: ordinary prefill through the blend pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from cacheblend_rag.blend.selectors.base import Evidence, Selector


@dataclass(frozen=True)
class AllTokens(Selector):
    """Ratio 1, whatever the configured ratio."""

    fixed_ratio: ClassVar[float | None] = 1.0

    def score(self, evidence: Evidence) -> Tensor:
        return evidence.offsets.new_zeros(evidence.offsets.shape).float()
