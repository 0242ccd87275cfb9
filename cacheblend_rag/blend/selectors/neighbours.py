"""Lets tokens beside highly ranked ones rank as high: runs of tokens instead of scattered ones."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from cacheblend_rag.blend.selectors.base import Evidence, Selector, given
from cacheblend_rag.blend.selectors.probe import Probe
from cacheblend_rag.errors import ConfigError


@dataclass(frozen=True)
class Neighbours(Selector):
    """Another selector's scores, spread over tokens at neighbouring positions.

    Source: FusionRAG (arXiv 2601.12904) takes runs of tokens, and joins gaps of at most two.

    Args:
        of: the selector whose scores these are.
        neighbours: tokens on each side of a token that rank as high as it does.
        gap: the most tokens between two tokens that rank as high as the lower of the two.

    Raises:
        ConfigError: when ``neighbours`` or ``gap`` is no integer of at least 0.
    """

    of: Selector
    neighbours: int = 0
    gap: int = 0

    def __post_init__(self) -> None:
        for name, value in (("neighbours", self.neighbours), ("gap", self.gap)):
            if type(value) is not int or value < 0:
                raise ConfigError(f"{name}={value!r} must be an integer of at least 0")
        # What the engine asks of a selector's class is a fact of the other selector here.
        for name in ("needs_fresh_kv", "needs_question", "needs_prior", "fixed_ratio"):
            object.__setattr__(self, name, getattr(self.of, name))

    @property
    def probe(self) -> Probe:
        return self.of.probe

    def score(self, evidence: Evidence) -> Tensor:
        scores = self.of.score(evidence)
        if not scores.numel():
            return scores
        positions = given(evidence.positions, "positions")
        positions = positions - positions[0]
        laid = scores.new_full((int(positions[-1]) + 1,), -torch.inf)
        here = positions.to(scores.device)
        spread = _joined(_widened(laid.index_copy(0, here, scores), self.neighbours), self.gap)
        return spread[here].masked_fill(scores == -torch.inf, -torch.inf)


def _widened(scores: Tensor, reach: int) -> Tensor:
    """Return at each position the highest score at most ``reach`` away, (positions,)."""
    return functional.max_pool1d(scores[None], 2 * reach + 1, 1, reach)[0]


def _joined(scores: Tensor, gap: int) -> Tensor:
    """Return scores whose dips of at most ``gap`` positions are filled, (positions,).

    This is the closing of greyscale morphology. Whatever share of the scores is taken then, it has
    no such gaps.
    """
    padded = functional.pad(scores, (gap, gap), value=-torch.inf)
    return padded.unfold(0, gap + 1, 1).amax(1).unfold(0, gap + 1, 1).amin(1)
