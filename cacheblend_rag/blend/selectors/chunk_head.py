"""Ranks the first tokens of each chunk highest: they are attention sinks if cached alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cacheblend_rag.blend.selectors.base import Evidence, Selector
from cacheblend_rag.errors import ConfigError


@dataclass(frozen=True)
class ChunkHead(Selector):
    """Earlier tokens first, at most ``tokens`` of each chunk. Source: EPIC (arXiv 2410.15332)."""

    tokens: int | None = None

    def __post_init__(self) -> None:
        if self.tokens is not None and self.tokens < 1:
            raise ConfigError(f"tokens={self.tokens!r} must be at least 1")

    def score(self, evidence: Evidence) -> Tensor:
        score = -evidence.offsets.float()
        if self.tokens is not None:
            score = score.masked_fill(evidence.offsets >= self.tokens, -torch.inf)
        return score
