"""``tune``: the cheapest settings that keep full prefill's quality on a user's questions."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, Literal, cast

import torch

from cacheblend_rag.engines.base import Engine
from cacheblend_rag.engines.model_files import load_tokenizer
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.engines.transformers import TransformersEngine
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.quality.dataset import EvalDataset, PromptFrame
from cacheblend_rag.quality.evaluator import opened_engines
from cacheblend_rag.quality.fidelity import TOKENS
from cacheblend_rag.quality.ladder import (
    BASE,
    LEAD_INS,
    LEAST,
    Bar,
    BarKind,
    Candidate,
    Ladder,
    Standing,
    candidates,
    rungs,
)
from cacheblend_rag.quality.measuring import Measures, QuestionMeasurer
from cacheblend_rag.quality.records import RecordLog
from cacheblend_rag.quality.rules import FULL, Rule
from cacheblend_rag.settings import EMBEDDED, LeadInConfig, LeadInKind, Profile

Outcome = Literal["recompute", "plain reuse", "do not blend"]
NO_ANSWERS = ("",)
GREY, GREEN, RED, BLUE = "#9aa0a6", "#188038", "#c5221f", "#1a73e8"
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
class _Tuner:
    """Measures candidates on questions, a prompt at a time; see ``tune``."""

    engines: Mapping[LeadInKind, Engine]
    frame: PromptFrame
    data: EvalDataset
    bar: Bar
    log: RecordLog
    on_round: OnRound

    def tune(self, tried: Sequence[Candidate], name: str) -> Tuned:
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
            rules_answer=self.bar.kind == "score",
            log=self.log,
        )

    def _take(
        self, ladder: Ladder, measurer: QuestionMeasurer, left: Sequence[Candidate], index: int
    ) -> None:
        """Add the results of one prompt, which are measured if they are not known."""
        question = self.data.questions[index]
        asked = question if question.answers else replace(question, answers=NO_ANSWERS)
        rules: list[Rule] = [one for one in left if len(ladder.results.get(one, ())) == index]
        if len(ladder.full) == index:
            rules.append(FULL)
        found = measurer.records(asked, {rule: rule.config(BASE, {}) for rule in rules})
        for rule, record in found.items():
            if isinstance(rule, Candidate):
                ladder.results.setdefault(rule, []).append(record)
            else:
                ladder.full.append(record)

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
        engines: one per lead-in, around one model and with the frame's opening as instruction. The
            KV of questions is put into their store and dropped again, unless it was there before.
        frame: of the prompts.
        data: the questions.
        tried: the candidates.
        bar: see Bar; questions without answers are measured by fidelity.
        least: the share, above 0.
        log: results that are known are taken from it, and new ones kept there.
        on_round: see OnRound.
        name: of the profile.

    Raises:
        ConfigError: without questions or candidates, when a lead-in has no engine, or when
            ``least`` is not above 0.
        PromptError: when a prompt does not fit the model.
    """
    if not 0 < least <= 1:
        raise ConfigError(f"least={least} must be above 0 and at most 1")
    if not data.questions or not tried:
        raise ConfigError("questions and candidates must be at least 1 each")
    if missing := {one.lead_in for one in tried} - engines.keys():
        raise ConfigError(f"lead_in={min(missing)!r} has no engine here")
    kind: BarKind = bar if all(one.answers for one in data.questions) else "fidelity"
    tuner = _Tuner(engines, frame, data, Bar(kind, least), log or RecordLog(), on_round)
    return tuner.tune(tried, name)


def tune_model(
    model: str,
    data: EvalDataset,
    *,
    bar: BarKind = "score",
    least: float = LEAST,
    lead_ins: Sequence[str] = LEAD_INS,
    selectors: Sequence[str] | None = None,
    ratios: Sequence[float] | None = None,
    check_layers: Sequence[int] | None = None,
    name: str = "tuned",
    resume: Path | None = None,
    device: str | None = None,
    dtype: str | None = None,
    on_round: OnRound = lambda name, steps: lambda: None,
) -> Tuned:
    """Return the cheapest settings that keep a model's quality on some questions.

    Chunk KV is kept in a store of its own, in memory.

    Args:
        model: as for open_engine.
        data: the questions.
        bar: ``score`` compares answers with gold answers, ``fidelity`` predictions with full
            prefill's.
        least: the share of full prefill's quality to keep.
        lead_ins: the lead-ins to try.
        selectors: the selectors to try, and so on; see ``candidates``.
        ratios: the recompute ratios to try.
        check_layers: the check layers to try.
        name: of the profile.
        resume: a file in which each prompt's results are kept, and from which known ones are taken.
        device: where the model runs.
        dtype: in what precision.
        on_round: called with each round's name and steps; returns a function that is called after
            each step.

    Raises:
        ModelLoadError: when the model cannot be loaded.
        UnsupportedModelError: when its KV cannot be blended.
        ConfigError: when a setting is wrong, or full prefill answers no question.
        PromptError: when a prompt does not fit the model.
        DatasetError: when ``resume`` holds other things.
    """
    log = RecordLog.resumed(resume) if resume else None
    frame = PromptFrame.of(load_tokenizer(model), data.instruction)
    kinds = [LeadInConfig.of(one).kind for one in dict.fromkeys(lead_ins)]
    opened = opened_engines(
        EMBEDDED, model, kinds, instruction=frame.opening, device=device, dtype=dtype
    )
    with opened as engines:
        first = cast(TransformersEngine, next(iter(engines.values())))
        tried = candidates(
            first.model.config.get_text_config().num_hidden_layers,
            lead_ins=kinds,
            selectors=selectors,
            ratios=ratios,
            check_layers=check_layers,
        )
        return tune(
            engines,
            frame,
            data,
            tried,
            bar=bar,
            least=least,
            log=log,
            on_round=on_round,
            name=name,
        )


def pareto(standings: Sequence[Standing]) -> list[Standing]:
    """Return the candidates that no other one beats in both time and quality, by time."""
    front: list[Standing] = []
    for one in sorted(standings, key=lambda one: (one.ttft_share, -one.kept.quality)):
        if not front or one.kept.quality > front[-1].kept.quality:
            front.append(one)
    return front


def plot(tuned: Tuned, path: Path) -> None:
    """Draw a picture: time to first token across, the share of quality that is kept up.

    Filled points were measured on all prompts, hollow ones were dropped before. Green ones hold the
    bar, which is the red line. Those that no other one beats are joined by a line; they and all
    that hold the bar have their names beside them.
    """
    from matplotlib.figure import Figure

    figure, front = Figure(figsize=(9, 5), layout="constrained"), pareto(tuned.standings)
    axes = figure.subplots()
    axes.plot(
        [one.ttft_share for one in front], [one.kept.quality for one in front], color=GREY, zorder=1
    )
    axes.axhline(tuned.bar.least, color=RED, linewidth=1)
    for one in tuned.standings:
        colour, at = GREEN if one.holds else BLUE, (one.ttft_share, one.kept.quality)
        fill = colour if one.prompts == tuned.prompts else "white"
        axes.scatter(*at, color=fill, edgecolors=colour, zorder=2)
        if one.holds or one in front:
            axes.annotate(one.candidate.label, at, (6, -3), textcoords="offset points", fontsize=7)
    kept = "exp(-KL)" if tuned.bar.kind == "fidelity" else "F1 / full prefill's"
    axes.set_title(f"{kept}, {tuned.prompts} prompts of {tuned.dataset}", loc="left", fontsize=9)
    axes.set_xlabel("time to first token, share of full prefill's")
    figure.savefig(path, format="svg")
