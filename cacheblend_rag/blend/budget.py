"""How a budget of rows is spent: thresholds on the scores, and shares of the chunks.

Sources: FusionRAG (arXiv 2601.12904) recomputes tokens above the mean by half a standard deviation;
budgets per chunk are this project's.

The arithmetic is NumPy's, on one thread: PyTorch spreads indexing from some thousand elements on
over all threads of the CPU, and waking them takes longer than the work.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cacheblend_rag.blend.rows import Mask, Positions
from cacheblend_rag.settings import BlendConfig, ChunkBudget

Floats = NDArray[np.float64]
Scores = NDArray[np.float32]

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
        chunks. All are on the host. Of equal scores the first ones win, so that the choice is the
        same on every device.
        """
        given = scores.numpy()
        if self == Budget():
            return torch.from_numpy(best(given, count))
        order = _ranked(given)
        if not order.size or count < 1:
            return torch.from_numpy(order[:0])
        own = np.zeros_like(order) if chunks is None else chunks.numpy()[order]
        kinds = self._kinds(given[order].astype(np.float64), own, count)
        taken = np.argsort(kinds, kind="stable")[:count]
        return torch.from_numpy(np.sort(order[taken[kinds[taken] != REFUSED]]))

    def _kinds(self, scores: Floats, chunks: Positions, count: int) -> Positions:
        """Return (tokens,) int64, the kind of each token; tokens in falling order of score."""
        kinds = np.where(self._passed(scores), REST, REFUSED)
        if self.per_chunk == "none" and not self.least:
            return kinds
        sizes = np.bincount(chunks)
        present = int((sizes > 0).sum())
        least = min(self.least, count // present)
        shared = self._shares(scores, chunks) * (count - least * present) + 1e-9
        quotas = least + shared.astype(np.int64)
        places = _places(chunks, sizes)
        kinds[(places < quotas[chunks]) & (kinds == REST)] = QUOTA
        kinds[places < least] = MINIMUM
        return kinds

    def _passed(self, scores: Floats) -> Mask:
        passed = np.ones(scores.shape, dtype=np.bool_)
        if self.sigmas is not None:
            passed &= scores > scores.mean() + self.sigmas * scores.std()
        if self.mass is not None:
            passed &= _fewest_with(_weights(scores), self.mass)
        return passed

    def _shares(self, scores: Floats, chunks: Positions) -> Floats:
        """Return (chunks,) float64: the share of the rows that each chunk gets by itself."""
        masses = np.bincount(chunks, _weights(scores))
        if self.per_chunk == "none":
            return np.zeros_like(masses)
        if self.per_chunk == "equal" or not masses.sum() > 0:
            masses = (np.bincount(chunks) > 0).astype(np.float64)
        shares: Floats = masses / masses.sum()
        return shares


def best(scores: Scores, count: int) -> Positions:
    """Return the indices, rising, of the ``count`` highest scores; -inf never counts.

    Of equal scores the first ones win.
    """
    usable = np.flatnonzero(scores > -np.inf)
    if count >= usable.size:
        return usable
    if count < 1:
        return usable[:0]
    values = scores[usable]
    lowest = np.partition(values, -count)[-count]
    taken = values > lowest
    taken[np.flatnonzero(values == lowest)[: count - np.count_nonzero(taken)]] = True
    chosen: Positions = usable[taken]
    return chosen


def fewest_with(weights: Tensor, share: float) -> Tensor:
    """Return (tokens,) bool: the fewest tokens whose weights add up to ``share`` of all.

    weights: (tokens,), at least 0, on the host. Of equal weights the first ones are taken.
    """
    return torch.from_numpy(_fewest_with(weights.numpy().astype(np.float64), share))


def _fewest_with(weights: Floats, share: float) -> Mask:
    order = np.argsort(-weights, kind="stable")
    ordered = weights[order]
    before = ordered.cumsum() - ordered
    taken = np.zeros(weights.shape, dtype=np.bool_)
    taken[order] = before < share * ordered.sum()
    return taken


def _ranked(scores: Scores) -> Positions:
    """Return the indices of all scores but -inf, highest first, equal scores in their order."""
    order = np.argsort(-scores, kind="stable")
    possible: Positions = order[scores[order] > -np.inf]
    return possible


def _weights(scores: Floats) -> Floats:
    """Return scores as weights: those of a rule that gives negative ones are moved up to 0."""
    return scores - min(float(scores.min()), 0.0)


def _places(chunks: Positions, sizes: Positions) -> Positions:
    """Return (tokens,) int64: how many earlier tokens are of the same chunk; sizes: of each."""
    order = np.argsort(chunks, kind="stable")
    starts = sizes.cumsum() - sizes
    places = np.empty_like(chunks)
    places[order] = np.arange(chunks.size) - np.repeat(starts, sizes)
    return places
