"""Ranks runs of tokens that the question attends to before single tokens (FusionRAG)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cacheblend_rag.blend.rows import Positions
from cacheblend_rag.blend.selectors.base import Evidence, given
from cacheblend_rag.blend.selectors.probe import Heads
from cacheblend_rag.blend.selectors.question import Question
from cacheblend_rag.errors import ConfigError

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Fusion(Question):
    """Runs of attended tokens, most attended run first, then other tokens by their attention.

    A token is attended if its attention exceeds the mean by ``sigma`` standard deviations. Attended
    tokens with at most ``gap`` others between them are one run, which takes ``around`` tokens on
    each side along. Source: FusionRAG (arXiv 2601.12904).
    """

    span: Sequence[float] = (0.4, 0.75)
    heads: Heads = "sum"
    sigma: float = 0.5
    gap: int = 2
    around: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.sigma, int | float):
            raise ConfigError(f"sigma={self.sigma!r} must be a number")
        for name, value in (("gap", self.gap), ("around", self.around)):
            if type(value) is not int or value < 0:
                raise ConfigError(f"{name}={value!r} must be an integer of at least 0")

    def score(self, evidence: Evidence) -> Tensor:
        attention = super().score(evidence).double().numpy()
        run_ranks = np.full(len(attention), len(attention))
        runs = self._runs(attention, given(evidence.positions, "positions").numpy())
        for rank, run in enumerate(runs):
            run_ranks[run] = np.minimum(run_ranks[run], rank)
        order = np.lexsort((-attention, run_ranks))
        scores = np.empty(len(attention), np.float32)
        scores[order] = np.arange(len(attention), 0, -1)
        return torch.from_numpy(scores)

    def _runs(self, attention: Floats, positions: Positions) -> list[slice]:
        """Return the runs among the tokens, the one with the highest sum of attention first."""
        if not len(attention):
            return []
        attended = np.flatnonzero(attention > attention.mean() + self.sigma * attention.std())
        edges = np.flatnonzero(np.diff(positions[attended]) > self.gap + 1) + 1
        runs = [
            slice(
                int(np.searchsorted(positions, positions[part[0]] - self.around)),
                int(np.searchsorted(positions, positions[part[-1]] + self.around, "right")),
            )
            for part in np.split(attended, edges)
            if len(part)
        ]
        return sorted(runs, key=lambda run: -float(attention[run].sum()))
