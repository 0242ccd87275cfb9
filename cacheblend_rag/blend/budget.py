"""How a budget of rows is spent: thresholds on the scores, and shares of the chunks.

Sources: FusionRAG (arXiv 2601.12904) recomputes tokens above the mean by half a standard deviation;
budgets per chunk are this project's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from cacheblend_rag.settings import BlendConfig, ChunkBudget

MINIMUM, QUOTA, REST, REFUSED = range(4)
"""In this order tokens are taken, each kind by score."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Rules for spending a number of rows; without any, the best scores of the prompt are taken.

    sigmas: a score must exceed the mean by so many standard deviations. mass: no more than the
    fewest tokens that hold this share of all scores. per_chunk: how rows are shared among chunks.
    least: rows that each chunk gets, whatever its scores, if the number reaches that far.
    """

    sigmas: float | None = None
    mass: float | None = None
    per_chunk: ChunkBudget = "none"
    least: int = 0

    @classmethod
    def of(cls, config: BlendConfig) -> Self:
        """Return the rules of a request."""
        return cls(
            config.score_sigmas, config.score_mass, config.chunk_budget, config.chunk_min_rows
        )

    def rows(self, scores: Tensor, chunks: Tensor | None, count: int) -> Tensor:
        """Return the indices, rising, of at most ``count`` tokens; -inf is never taken.

        scores: (tokens,) float32. chunks: (tokens,) int64, each token's chunk, from 0; None without
        chunks. Of equal scores the first ones win, so that the choice is the same on every device.
        """
        order = ranked(scores)
        if not order.numel() or count < 1:
            return order[:0]
        own = torch.zeros_like(order) if chunks is None else chunks[order]
        kinds = self._kinds(scores[order].double(), own, count)
        taken = torch.sort(kinds, stable=True).indices[:count]
        return order[taken[kinds[taken] != REFUSED]].sort().values

    def _kinds(self, scores: Tensor, chunks: Tensor, count: int) -> Tensor:
        """Return (tokens,) int64, the kind of each token; tokens in falling order of score."""
        kinds = torch.where(self._passed(scores), REST, REFUSED)
        if self.per_chunk == "none" and not self.least:
            return kinds
        sizes = torch.bincount(chunks)
        present = int((sizes > 0).sum())
        least = min(self.least, count // present)
        quotas = least + (self._shares(scores, chunks) * (count - least * present) + 1e-9).long()
        places = _places(chunks, sizes)
        kinds[(places < quotas[chunks]) & (kinds == REST)] = QUOTA
        kinds[places < least] = MINIMUM
        return kinds

    def _passed(self, scores: Tensor) -> Tensor:
        passed = torch.ones_like(scores, dtype=torch.bool)
        if self.sigmas is not None:
            deviation = scores.std(unbiased=False)
            passed &= scores > scores.mean() + self.sigmas * deviation
        if self.mass is not None:
            passed &= fewest_with(_weights(scores), self.mass)
        return passed

    def _shares(self, scores: Tensor, chunks: Tensor) -> Tensor:
        """Return (chunks,) float64: the share of the rows that each chunk gets by itself."""
        masses = torch.bincount(chunks, _weights(scores))
        if self.per_chunk == "none":
            return torch.zeros_like(masses)
        if self.per_chunk == "equal" or not bool(masses.sum() > 0):
            masses = (torch.bincount(chunks) > 0).double()
        return masses / masses.sum()


def ranked(scores: Tensor) -> Tensor:
    """Return the indices of all scores but -inf, highest first; of equal ones the first leads."""
    order = torch.sort(scores, descending=True, stable=True).indices
    return order[scores[order] > -torch.inf]


def fewest_with(weights: Tensor, share: float) -> Tensor:
    """Return (tokens,) bool: the fewest tokens whose weights add up to ``share`` of all.

    weights: (tokens,), at least 0. Of equal weights the first ones are taken.
    """
    ordered, order = torch.sort(weights.double(), descending=True, stable=True)
    before = ordered.cumsum(0) - ordered
    taken = torch.zeros_like(weights, dtype=torch.bool)
    taken[order] = before < share * ordered.sum()
    return taken


def _weights(scores: Tensor) -> Tensor:
    """Return scores as weights: those of a rule that gives negative ones are moved up to 0."""
    return scores - scores.min().clamp(max=0)


def _places(chunks: Tensor, sizes: Tensor) -> Tensor:
    """Return (tokens,) int64: how many earlier tokens are of the same chunk; sizes: of each."""
    order = torch.sort(chunks, stable=True).indices
    starts = sizes.cumsum(0) - sizes
    places = torch.empty_like(chunks)
    places[order] = torch.arange(chunks.numel()) - starts.repeat_interleave(sizes)
    return places
