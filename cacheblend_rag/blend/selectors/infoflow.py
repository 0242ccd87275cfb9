"""Ranks tokens by the norm of the question's attention, a little above mid-depth (InfoFlow KV)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cacheblend_rag.blend.selectors.base import Evidence, given
from cacheblend_rag.blend.selectors.probe import Heads, Tokens
from cacheblend_rag.blend.selectors.question import Question
from cacheblend_rag.errors import ConfigError


@dataclass(frozen=True)
class InfoFlow(Question):
    """L2 norm over the question's tokens of the heads' summed attention. Source: arXiv 2603.05353.

    skip_first: never recompute the first of the chunks that may be recomputed: if it was computed
    after the instruction, its KV is exact.
    """

    span: Sequence[float] = (0.6, 0.75)
    heads: Heads = "sum"
    tokens: Tokens = "norm"
    skip_first: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.skip_first, bool):
            raise ConfigError(f"skip_first={self.skip_first!r} must be true or false")

    def score(self, evidence: Evidence) -> Tensor:
        attention = super().score(evidence)
        if not self.skip_first or not attention.numel():
            return attention
        chunk_starts = given(evidence.positions, "positions") - evidence.offsets
        return attention.masked_fill(chunk_starts == chunk_starts[0], -torch.inf)
