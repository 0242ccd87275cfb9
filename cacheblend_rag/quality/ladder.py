"""Successive halving: the settings that may be the cheapest to hold the bar get more prompts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Literal

from cacheblend_rag.quality.candidates import Candidate
from cacheblend_rag.quality.metrics import bootstrap_interval, ratio_interval
from cacheblend_rag.quality.records import PromptRecord

BarKind = Literal["score", "fidelity"]
LEAST = 0.95
AT_ONCE = 4
"""Dropped candidates that are measured together, so that they share full prefill's pass."""

Measure = Callable[[Sequence[Candidate], int], None]
"""Measures some candidates on the first so many prompts."""


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


@dataclass(frozen=True)
class Standing:
    """A candidate's figures on the prompts that it was measured on.

    kept: what it keeps of full prefill's quality. ttft_seconds, full_ttft_seconds: means of its
    time to first token, and of full prefill's on the same prompts. compute_share: as in
    BlendReport. holds: whether it was measured on all prompts and holds the bar.
    """

    candidate: Candidate
    prompts: int
    kept: Kept
    ttft_seconds: float
    full_ttft_seconds: float
    compute_share: float
    holds: bool

    @property
    def ttft_share(self) -> float:
        """Time to first token as a share of full prefill's."""
        return self.ttft_seconds / self.full_ttft_seconds


@dataclass
class Ladder:
    """Candidates and their results.

    full: full prefill's results by prompt. results: each candidate's, of the first prompts.
    """

    candidates: Sequence[Candidate]
    bar: Bar
    full: list[PromptRecord] = field(default_factory=list)
    results: dict[Candidate, list[PromptRecord]] = field(default_factory=dict)

    def climb(self, sizes: Sequence[int], measure: Measure) -> Candidate | None:
        """Return the cheapest candidate that holds the bar on all prompts, or None.

        sizes: prompts of each round. In each, candidates that can no longer hold the bar are
        dropped, then the half of the others that is the least likely to be the answer. If none of
        the last ones holds the bar, the dropped ones get their turn, a few at once, the cheapest
        first.
        """
        left = list(self.candidates)
        *early, last = sizes
        for size in early:
            measure(left, size)
            left = self._likelier_half([one for one in left if self._may_hold(one)])
            if not left:
                break
        if left:
            measure(left, last)
        waiting = [one for one in self._by_cost() if self._may_hold(one) and one not in left]
        while waiting and self.best(last) is None:
            measure(waiting[:AT_ONCE], last)
            waiting = waiting[AT_ONCE:]
        return self.best(last)

    def best(self, prompts: int) -> Candidate | None:
        """Return the cheapest candidate that was measured on all prompts and holds the bar."""
        standing = (self.standing(one, prompts) for one in self._by_cost())
        return next((one.candidate for one in standing if one.holds), None)

    def standing(self, candidate: Candidate, prompts: int) -> Standing:
        """Return a candidate's figures; prompts: of the last round."""
        found = self.results[candidate]
        full = self.full[: len(found)]
        kept = self.bar.kept(found, full)
        return Standing(
            candidate=candidate,
            prompts=len(found),
            kept=kept,
            ttft_seconds=_ttft(found),
            full_ttft_seconds=_ttft(full),
            compute_share=mean(one.compute_share for one in found),
            holds=len(found) == prompts and self.bar.holds(kept) and _is_sooner(found, full),
        )

    def _may_hold(self, candidate: Candidate) -> bool:
        return self.bar.may_hold(self._kept(candidate))

    def _kept(self, candidate: Candidate) -> Kept:
        found = self.results[candidate]
        return self.bar.kept(found, self.full[: len(found)])

    def _likelier_half(self, left: Sequence[Candidate]) -> list[Candidate]:
        """Return those next in cost to the cheapest one that holds the bar so far.

        If none does so far, then those of the highest quality.
        """
        by_cost = [one for one in self._by_cost() if one in left]
        quality = [self._kept(one).quality for one in by_cost]
        holding = [rank for rank, each in enumerate(quality) if each >= self.bar.least]
        ranks = range(len(by_cost))
        if holding:
            likely = sorted(ranks, key=lambda rank: (abs(rank - holding[0]), -rank))
        else:
            likely = sorted(ranks, key=lambda rank: -quality[rank])
        kept = set(likely[: math.ceil(len(by_cost) / 2)])
        return [one for rank, one in enumerate(by_cost) if rank in kept]

    def _by_cost(self) -> list[Candidate]:
        """Return all candidates by their time to first token over full prefill's."""
        return sorted(self.results, key=lambda one: self.standing(one, 0).ttft_share)


def _ttft(records: Sequence[PromptRecord]) -> float:
    return mean(one.ttft_seconds or 0.0 for one in records)


def _is_sooner(found: Sequence[PromptRecord], full: Sequence[PromptRecord]) -> bool:
    return _ttft(found) < _ttft(full)
