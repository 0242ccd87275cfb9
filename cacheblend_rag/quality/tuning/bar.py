"""The bar that settings must hold: a share of full prefill's score, or of its likelihood."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Literal

from cacheblend_rag.quality.metrics import bootstrap_interval, ratio_interval
from cacheblend_rag.quality.records import PromptRecord

BarKind = Literal["score", "fidelity"]
LEAST = 0.95


@dataclass(frozen=True)
class Kept:
    """How much of full prefill's quality some settings keep.

    quality: a share, which may be above 1. low, high: its 95 % bootstrap interval over
    prompts; from 0 to infinity if full prefill is right too seldom.
    """

    quality: float
    low: float
    high: float


@dataclass(frozen=True)
class Bar:
    """What settings must keep.

    kind: ``score`` is the mean F1 of answers over full prefill's on the same prompts, of which the
    lower end of the interval counts; ``fidelity`` is exp(-mean KL), of which the mean itself does.
    least: the share.
    """

    kind: BarKind
    least: float = LEAST

    def kept(self, found: Sequence[PromptRecord], full: Sequence[PromptRecord]) -> Kept:
        """Return what some settings keep; full: full prefill's results on the same prompts."""
        if self.kind == "fidelity":
            kls = [one.fidelity.kl for one in found if one.fidelity]
            low, high = bootstrap_interval(kls)
            return Kept(math.exp(-mean(kls)), math.exp(-high), math.exp(-low))
        own, best = [one.f1 for one in found], [one.f1 for one in full]
        share = mean(own) / mean(best) if any(best) else 0.0
        ends = ratio_interval(own, best)
        # Without an interval, full prefill is hardly ever right: too few prompts to tell.
        return Kept(share, *(ends or (0.0, math.inf)))

    def holds(self, kept: Kept) -> bool:
        """Whether it is kept."""
        return (kept.low if self.kind == "score" else kept.quality) >= self.least

    def may_hold(self, kept: Kept) -> bool:
        """Whether more prompts may show that it is kept."""
        return kept.high >= self.least
