"""The controls that every other selector is held against: all tokens, no token, random tokens."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from cacheblend_rag.blend.selectors.base import Evidence, Selector


class AllTokens(Selector):
    """Ordinary prefill through the blend pass: ratio 1, whatever the configured ratio."""

    fixed_ratio: ClassVar[float | None] = 1.0

    def score(self, evidence: Evidence) -> Tensor:
        return torch.zeros_like(evidence.offsets, dtype=torch.float32)


class NoTokens(Selector):
    """Plain reuse of cached KV: ratio 0, whatever the configured ratio."""

    fixed_ratio: ClassVar[float | None] = 0.0

    def score(self, evidence: Evidence) -> Tensor:
        return torch.full_like(evidence.offsets, -torch.inf, dtype=torch.float32)


class Random(Selector):
    """Uniformly random scores, the same for the same seed and number of tokens."""

    seed: int = 0

    def score(self, evidence: Evidence) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        return torch.rand(evidence.offsets.numel(), generator=generator).to(evidence.offsets.device)
