"""Recomputes no token: plain reuse of cached KV."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from cacheblend_rag.blend.selectors.base import Evidence, Selector


@dataclass(frozen=True)
class NoTokens(Selector):
    """Ratio 0, whatever the configured ratio."""

    fixed_ratio: ClassVar[float | None] = 0.0

    def score(self, evidence: Evidence) -> Tensor:
        return torch.full(evidence.offsets.shape, -torch.inf, device=evidence.offsets.device)
