"""Ranks the first tokens of each chunk highest: they are attention sinks if cached alone."""

from __future__ import annotations

import torch
from torch import Tensor

from cacheblend_rag.blend.selectors.base import Evidence, Selector
from cacheblend_rag.settings.base import Positive


class ChunkHead(Selector):
    """Earlier tokens first, at most ``tokens`` of each chunk. Source: EPIC (arXiv 2410.15332)."""

    tokens: Positive | None = None

    def score(self, evidence: Evidence) -> Tensor:
        score = -evidence.offsets.float()
        if self.tokens is not None:
            score = score.masked_fill(evidence.offsets >= self.tokens, -torch.inf)
        return score
