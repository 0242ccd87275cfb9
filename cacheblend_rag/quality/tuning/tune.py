"""``tune``: the cheapest settings that keep full prefill's quality on a user's questions."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice, zip_longest
from typing import Any, Literal

import torch

from cacheblend_rag.engines.base import Engine
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.quality.dataset import EvalDataset, EvalQuestion
from cacheblend_rag.quality.fidelity import TOKENS
from cacheblend_rag.quality.frame import PromptFrame
from cacheblend_rag.quality.measuring import Measures, QuestionMeasurer
from cacheblend_rag.quality.records import RecordLog, question_key
from cacheblend_rag.quality.rules import FULL, Rule
from cacheblend_rag.quality.tuning.bar import LEAST, Bar, BarKind
from cacheblend_rag.quality.tuning.candidates import BASE, Candidate, rungs
from cacheblend_rag.quality.tuning.ladder import Ladder, Standing
from cacheblend_rag.settings import LeadInKind, Profile

Outcome = Literal["recompute", "plain reuse", "do not blend"]
NO_ANSWERS = ("",)
OnRound = Callable[[str, int], Callable[[], None]]
"""Called with a round's name and its steps; returns a function that is called after each step."""


@dataclass(frozen=True)
class Tuned:
    """What was found.

    Args:
        outcome: ``recompute``, ``plain reuse`` if that is enough, or ``do not blend``.
        bar: what had to be kept.
        standings: each candidate's figures, the cheapest first.
        profile: the cheapest settings that hold the bar; None with ``do not blend``.
        dataset: the name of the questions.
        prompts: how many there were.
    """

    outcome: Outcome
    bar: Bar
    standings: Sequence[Standing]
    profile: Profile | None
    dataset: str
    prompts: int

    @property
    def advice(self) -> str:
        """One line: what to do."""
        if self.profile is None:
            return (
                f"do not blend this model on such questions: nothing keeps {self.bar.least:g} of "
                "full prefill's quality sooner than it"
            )
        best = next(one for one in self.standings if one.holds)
        told = f"{1 / best.ttft_share:.1f} times sooner, {best.compute_share:.0%} of the work"
        if self.outcome == "plain reuse":
            return f"plain reuse is enough: {best.candidate.label}, {told}"
        return f"{best.candidate.label}: {told}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "outcome": self.outcome,
            "advice": self.advice,
            "bar": asdict(self.bar),
            "dataset": self.dataset,
            "prompts": self.prompts,
            "profile": self.profile and self.profile.to_dict(),
            "candidates": [_plain(one) for one in self.standings],
        }


@dataclass(frozen=True)
class Tuner:
    """Measures candidates on questions, a prompt at a time.

    Args:
        engines: one per lead-in, around one model and with the frame's opening as instruction. The
            KV of questions is put into their store and dropped again, unless it was there before.
        frame: of the prompts.
        data: the questions; without answers, the bar is fidelity.
        bar: what must be kept.
        log: results that are known are taken from it, and new ones kept there.
        on_round: see OnRound.
    """

    engines: Mapping[LeadInKind, Engine]
    frame: PromptFrame
    data: EvalDataset
    bar: Bar
    log: RecordLog = field(default_factory=RecordLog)
    on_round: OnRound = lambda name, steps: lambda: None

    def tune(self, tried: Sequence[Candidate], *, name: str = "tuned") -> Tuned:
        """Return the cheapest of some candidates that holds the bar.

        Args:
            tried: the candidates.
            name: of the profile.

        Raises:
            ConfigError: without questions or candidates, or when a lead-in has no engine.
            PromptError: when a prompt does not fit the model.
        """
        if not self.data.questions or not tried:
            raise ConfigError("questions and candidates must be at least 1 each")
        if missing := {one.lead_in for one in tried} - self.engines.keys():
            raise ConfigError(f"lead_in={min(missing)!r} has no engine here")
        ladder, measurer = Ladder(tried, self.bar), self._measurer()

        def measure(left: Sequence[Candidate], size: int) -> None:
            advance = self.on_round(f"{len(left)} settings, {size} prompts", size)
            for index in range(size):
                self._take(ladder, measurer, left, index)
                advance()
            if self.bar.kind == "score" and not any(one.f1 for one in ladder.full):
                raise ConfigError(
                    f"full prefill answered none of {size} questions: compare by bar='fidelity'"
                )

        prompts = len(self.data.questions)
        best = ladder.climb(rungs(prompts), measure)
        standings = [ladder.standing(one, prompts) for one in ladder.results]
        standings.sort(key=lambda one: one.ttft_share)
        return Tuned(
            outcome=_outcome(best),
            bar=self.bar,
            standings=standings,
            profile=self._profile(best, ladder, name) if best else None,
            dataset=self.data.name,
            prompts=prompts,
        )

    def _measurer(self) -> QuestionMeasurer:
        sampling = SamplingParams.greedy(max_tokens=TOKENS, stop=self.frame.stop)
        measures = Measures(fidelity=True, ttft=True)
        return QuestionMeasurer(
            self.engines,
            self.frame,
            sampling,
            measures,
            owns_store=False,
            rules_answer=self._rules_answer,
        )

    @property
    def _rules_answer(self) -> bool:
        """Whether the bar looks at candidates' answers."""
        return self.bar.kind == "score"

    def _take(
        self, ladder: Ladder, measurer: QuestionMeasurer, left: Sequence[Candidate], index: int
    ) -> None:
        """Add the results of one prompt, which are measured if they are not known."""
        question = self.data.questions[index]
        asked = question if question.answers else replace(question, answers=NO_ANSWERS)
        lacking = [one for one in left if len(ladder.results.get(one, ())) == index]
        rules: list[Rule] = [*lacking]
        if len(ladder.full) == index:
            rules.append(FULL)
        keys = {rule: self._key(asked, rule) for rule in rules}
        unknown = {r: r.config(BASE, {}) for r in rules if self.log.get(keys[r]) is None}
        for rule, measured in measurer.measure(asked, unknown) if unknown else ():
            self.log.put(keys[rule], measured)
        for rule in rules:
            record = self.log.get(keys[rule])
            of_rule = ladder.full
            if isinstance(rule, Candidate):
                of_rule = ladder.results.setdefault(rule, [])
            of_rule.extend([record] if record else [])

    def _key(self, question: EvalQuestion, rule: Rule) -> dict[str, Any]:
        engine = self.engines.get(rule.lead_in) or next(iter(self.engines.values()))
        return {
            "question": question_key(question, self.frame.prompt(question)),
            "rule": rule.label if isinstance(rule, Candidate) else rule.selector,
            "model": engine.model_name,
            "dtype": engine.dtype,
            "kv": engine.fingerprint,
            "tokens": TOKENS,
            "rules_answer": self._rules_answer,
        }

    def _profile(self, best: Candidate, ladder: Ladder, name: str) -> Profile:
        engine = self.engines[best.lead_in]
        standing = ladder.standing(best, len(self.data.questions))
        kept = standing.kept
        measured = {
            "dataset": self.data.name,
            "prompts": standing.prompts,
            "bar": self.bar.kind,
            "least": self.bar.least,
            "quality": kept.quality,
            "quality_ci95": [kept.low, kept.high if math.isfinite(kept.high) else 0.0],
            "ttft_seconds": standing.ttft_seconds,
            "full_ttft_seconds": standing.full_ttft_seconds,
            "compute_share": standing.compute_share,
            "engine": engine.name,
            "dtype": engine.dtype or "",
            "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
        }
        return best.profile(name, engine.model_name, measured)


def mixed(data: EvalDataset, count: int) -> EvalDataset:
    """Return at most so many questions, of each setting in turn, so that any few are of all."""
    settings = [data.of_setting(setting) for setting in data.settings]
    turns = (one for turn in zip_longest(*settings) for one in turn if one is not None)
    return replace(data, questions=tuple(islice(turns, count)))


def _outcome(best: Candidate | None) -> Outcome:
    if best is None:
        return "do not blend"
    return "plain reuse" if best.selector == "none" else "recompute"


def _plain(one: Standing) -> dict[str, Any]:
    kept = one.kept
    return {
        "lead_in": one.candidate.lead_in,
        "selector": one.candidate.selector,
        "ratio": one.candidate.ratio,
        "check_layers": list(one.candidate.check_layers),
        "prompts": one.prompts,
        "quality": kept.quality,
        "quality_ci95": [kept.low, kept.high if math.isfinite(kept.high) else None],
        "ttft_seconds": one.ttft_seconds,
        "ttft_share": one.ttft_share,
        "compute_share": one.compute_share,
        "holds": one.holds,
    }


def tune(
    engines: Mapping[LeadInKind, Engine],
    frame: PromptFrame,
    data: EvalDataset,
    tried: Sequence[Candidate],
    *,
    bar: BarKind = "score",
    least: float = LEAST,
    log: RecordLog | None = None,
    on_round: OnRound = lambda name, steps: lambda: None,
    name: str = "tuned",
) -> Tuned:
    """Return the cheapest settings that keep a share of full prefill's quality.

    Args:
        engines: as for Tuner.
        frame: as for Tuner.
        data: as for Tuner.
        tried: the candidates.
        bar: see Bar; questions without answers are measured by fidelity.
        least: the share, above 0.
        log: as for Tuner.
        on_round: as for Tuner.
        name: of the profile.

    Raises:
        ConfigError: as Tuner.tune, or when ``least`` is not above 0.
        PromptError: as Tuner.tune.
    """
    if not 0 < least <= 1:
        raise ConfigError(f"least={least} must be above 0 and at most 1")
    kind: BarKind = bar if all(one.answers for one in data.questions) else "fidelity"
    tuner = Tuner(engines, frame, data, Bar(kind, least), log or RecordLog(), on_round)
    return tuner.tune(tried, name=name)
