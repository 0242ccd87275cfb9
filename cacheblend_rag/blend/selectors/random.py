"""Ranks tokens at random: the control that every other selector must beat."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cacheblend_rag.blend.selectors.base import Evidence, Selector


@dataclass(frozen=True)
class Random(Selector):
    """Uniformly random scores, the same for the same seed and number of tokens."""

    seed: int = 0

    def score(self, evidence: Evidence) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        return torch.rand(evidence.offsets.numel(), generator=generator).to(evidence.offsets.device)
