"""The settings that are tried, and which of them get more prompts: successive halving."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from statistics import mean
from types import MappingProxyType
from typing import Any, Literal

from cacheblend_rag.blend.selectors import make_selector
from cacheblend_rag.quality.metrics import bootstrap_interval, ratio_interval
from cacheblend_rag.quality.records import PromptRecord
from cacheblend_rag.quality.rules import Options, Rule
from cacheblend_rag.settings import BlendConfig, LeadInConfig, LeadInKind, Profile

LEAD_INS: tuple[LeadInKind, ...] = ("instruction", "document")
SELECTORS = ("none", "question_mid", "hkvd")
RATIOS = (0.05, 0.08, 0.16, 0.25)
BASE, NO_OPTIONS = BlendConfig(), MappingProxyType[str, Mapping[str, Any]]({})
FIRST_RUNG, STEP = 8, 2
"""Prompts of the first rung, and the factor from one rung to the next."""
BarKind = Literal["score", "fidelity"]
LEAST = 0.95
AT_ONCE = 4
"""Dropped candidates that are measured together, so that they share full prefill's pass."""


@dataclass(frozen=True)
class Candidate(Rule):
    """A rule, with the layers at which its selector compares KV; none for most selectors."""

    check_layers: tuple[int, ...] = ()

    def config(self, base: BlendConfig = BASE, options: Options = NO_OPTIONS) -> BlendConfig:
        """Return the settings of its requests; see Rule."""
        config = super().config(base, options)
        return config.with_changes(check_layers=self.check_layers) if self.check_layers else config

    @property
    def label(self) -> str:
        """A short name, such as ``document hkvd 0.16 at 1``."""
        layers = f" at {','.join(map(str, self.check_layers))}" if self.check_layers else ""
        return f"{self.lead_in} {self.selector} {self.ratio:g}{layers}"

    def profile(self, name: str, model: str, measured: dict[str, Any]) -> Profile:
        """Return it as a profile."""
        blend: dict[str, Any] = {"selector": self.selector, "recompute_ratio": self.ratio}
        if self.check_layers:
            blend["check_layers"] = self.check_layers
        return Profile(
            name=name,
            model=model,
            blend=BlendConfig(**blend),
            lead_in=LeadInConfig(kind=self.lead_in),
            measured=measured,
        )


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


def candidates(
    layers: int,
    *,
    lead_ins: Sequence[str] | None = None,
    selectors: Sequence[str] | None = None,
    ratios: Sequence[float] | None = None,
    check_layers: Sequence[int] | None = None,
) -> list[Candidate]:
    """Return lead-in x selector x ratio x check layer; nothing recomputed once for each lead-in.

    layers: of the model. What is None is chosen: LEAD_INS, SELECTORS, RATIOS, and as check layers
    the second one and one at a fifth of the depth. Raises ConfigError on an unknown name or an
    invalid ratio.
    """
    at = check_layers or sorted({1, max(1, layers // 5)})
    kinds = [LeadInConfig.of(one).kind for one in lead_ins or LEAD_INS]
    cells = product(kinds, selectors or SELECTORS, ratios or RATIOS)
    found = (one for cell in cells for one in _of_cell(*cell, at))
    return list(dict.fromkeys(found))


def _of_cell(
    lead_in: LeadInKind, selector: str, ratio: float, check_layers: Sequence[int]
) -> list[Candidate]:
    BlendConfig(recompute_ratio=ratio)
    needs_layer = make_selector(selector).needs_fresh_kv
    if selector == "none" or ratio == 0:
        return [Candidate(lead_in, "none", 0.0)]
    layers = [(layer,) for layer in check_layers] if needs_layer else [()]
    return [Candidate(lead_in, selector, ratio, check_layers=at) for at in layers]


def rungs(prompts: int, first: int = FIRST_RUNG) -> list[int]:
    """Return how many prompts each round uses: twice as many each time, all of them at last."""
    sizes = []
    while first < prompts:
        sizes.append(first)
        first *= STEP
    return [*sizes, prompts]
