"""``tune``: the cheapest settings that keep full prefill's quality on a user's questions."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice, zip_longest
from pathlib import Path
from statistics import mean
from typing import Any, Literal

import torch

from cacheblend_rag.engines.base import Engine
from cacheblend_rag.engines.model_files import load_tokenizer
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.quality.dataset import EvalDataset, PromptFrame
from cacheblend_rag.quality.evaluate import GRID, opened, read_rules, reuse
from cacheblend_rag.quality.measure import FULL, Record, RecordLog, Rule, measure
from cacheblend_rag.quality.scores import bootstrap_interval, ratio_interval
from cacheblend_rag.settings import EMBEDDED, BlendConfig, EngineConfig, LeadInConfig, Profile

Outcome = Literal["recompute", "plain reuse", "do not blend"]
BarKind = Literal["score", "fidelity"]
LEAST = 0.95


@dataclass(frozen=True)
class Bar:
    """What settings must keep of full prefill's quality.

    Args:
        kind: ``score`` is the mean F1 of answers over full prefill's on the same prompts, of which
            the lower end of the interval counts; ``fidelity`` is exp(-mean KL), of which the mean
            itself does.
        least: the share.

    Raises:
        ConfigError: for another kind, or a share that is not above 0 and at most 1.
    """

    kind: BarKind = "score"
    least: float = LEAST

    def __post_init__(self) -> None:
        if self.kind not in ("score", "fidelity") or not 0 < self.least <= 1:
            told = f"{self.kind}={self.least:g}"
            raise ConfigError(f"bar {told!r} must be score or fidelity, with a share up to 1")

    @classmethod
    def read(cls, text: str) -> Bar:
        """Return the bar of a text such as ``score`` or ``fidelity=0.9``; raises ConfigError."""
        kind, _, least = text.partition("=")
        try:
            return cls(kind, float(least or LEAST))  # type: ignore[arg-type]
        except ValueError as error:
            raise ConfigError(f"bar {text!r} must be KIND=SHARE, such as fidelity=0.95") from error

    def kept(self, found: Sequence[Record], full: Sequence[Record]) -> tuple[float, float, float]:
        """Return the share that some settings keep, and its 95 % bootstrap interval.

        full: full prefill's results on the same prompts; if it is right too seldom, the interval is
        from 0 to infinity.
        """
        if self.kind == "fidelity":
            kls = [one.fidelity.kl if one.fidelity else math.inf for one in found]
            low, high = bootstrap_interval(kls)
            return math.exp(-mean(kls)), math.exp(-high), math.exp(-low)
        own, best = [one.f1 for one in found], [one.f1 for one in full]
        share = mean(own) / mean(best) if any(best) else 0.0
        return share, *(ratio_interval(own, best) or (0.0, math.inf))


@dataclass(frozen=True)
class Standing:
    """A rule's figures.

    quality: the share of full prefill's that it keeps, low, high: its interval. ttft_seconds,
    full_ttft_seconds: means of its time to first token, and of full prefill's. compute_share: as in
    BlendReport. holds: whether it holds the bar and is sooner than full prefill.
    """

    rule: Rule
    quality: float
    low: float
    high: float
    ttft_seconds: float
    full_ttft_seconds: float
    compute_share: float
    holds: bool

    @property
    def config(self) -> BlendConfig:
        """How it blends."""
        return self.rule.config or BlendConfig()

    @property
    def ttft_share(self) -> float:
        """Time to first token as a share of full prefill's."""
        return self.ttft_seconds / self.full_ttft_seconds

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "lead_in": self.rule.lead_in,
            "selector": self.config.selector,
            "ratio": self.config.ratio,
            "check_layers": list(self.config.check_layers),
            "quality": self.quality,
            "quality_ci95": [self.low, self.high if math.isfinite(self.high) else None],
            "ttft_seconds": self.ttft_seconds,
            "ttft_share": self.ttft_share,
            "compute_share": self.compute_share,
            "holds": self.holds,
        }


@dataclass(frozen=True)
class Tuned:
    """What was found.

    Args:
        outcome: ``recompute``, ``plain reuse`` if that is enough, or ``do not blend``.
        bar: what had to be kept.
        standings: each rule's figures, the cheapest first.
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
        best = next((one for one in self.standings if one.holds), None)
        if best is None:
            return (
                f"do not blend this model on such questions: nothing keeps {self.bar.least:g} of "
                "full prefill's quality sooner than it"
            )
        told = f"{1 / best.ttft_share:.1f} times sooner, {best.compute_share:.0%} of the work"
        enough = "plain reuse is enough: " if self.outcome == "plain reuse" else ""
        return f"{enough}{best.rule.name}: {told}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "outcome": self.outcome,
            "advice": self.advice,
            "bar": asdict(self.bar),
            "dataset": self.dataset,
            "prompts": self.prompts,
            "profile": self.profile and self.profile.to_dict(),
            "candidates": [one.to_dict() for one in self.standings],
        }


def grid(engine: Engine, rules: str = "") -> list[Rule]:
    """Return the rules to try, laid over an engine's settings; raises ConfigError.

    rules: as for read_rules; plain reuse and GRID by default.
    """
    base, lead_in = engine.config, engine.lead_in.kind
    if rules:
        return read_rules(rules, base, lead_in)
    plain = [reuse(base, "instruction"), reuse(base, lead_in)]
    return list(dict.fromkeys([*plain, *read_rules(GRID, base, lead_in)]))


def tune(
    engine: Engine,
    frame: PromptFrame,
    data: EvalDataset,
    rules: Sequence[Rule],
    *,
    bar: Bar = Bar(),
    name: str = "tuned",
    log: RecordLog | None = None,
    on_prompt: Callable[[], None] = lambda: None,
) -> Tuned:
    """Return the cheapest settings that keep a share of full prefill's quality.

    Args:
        engine: its instruction is the frame's opening. The KV of questions is put into its store
            and dropped again, unless it was there before.
        frame: of the prompts.
        data: the questions.
        rules: to try.
        bar: what to keep.
        name: of the profile.
        log: as for measure.
        on_prompt: called after each.

    Raises:
        ConfigError: if full prefill answers no question right, and the bar is the score.
        PromptError: when a prompt does not fit the model.
    """
    found = []
    for measured in measure(
        engine, map(frame.to_measure, data.questions), [FULL, *rules], stop=frame.stop, log=log
    ):
        found.append({rule: one.record for rule, one in measured.items()})
        on_prompt()
    full = [records[FULL.name] for records in found]
    if bar.kind == "score" and not any(one.f1 for one in full):
        raise ConfigError(
            f"full prefill answered none of {len(full)} questions: compare by --bar fidelity"
        )
    standings = [_standing(rule, [one[rule.name] for one in found], full, bar) for rule in rules]
    standings.sort(key=lambda one: one.ttft_share)
    best = next((one for one in standings if one.holds), None)
    outcome: Outcome = "do not blend"
    if best is not None:
        outcome = "plain reuse" if best.config.selector == "none" else "recompute"
    profile = (
        None
        if best is None
        else _profile(best, engine, name, {"dataset": data.name, "prompts": len(full)}, bar)
    )
    return Tuned(outcome, bar, standings, profile, data.name, len(full))


def _standing(rule: Rule, found: Sequence[Record], full: Sequence[Record], bar: Bar) -> Standing:
    quality, low, high = bar.kept(found, full)
    seconds, of_full = (mean(one.ttft_seconds for one in of) for of in (found, full))
    holds = (low if bar.kind == "score" else quality) >= bar.least and seconds < of_full
    work = mean(one.compute_share for one in found)
    return Standing(rule, quality, low, high, seconds, of_full, work, holds)


def _profile(
    best: Standing, engine: Engine, name: str, measured: dict[str, Any], bar: Bar
) -> Profile:
    told = best.to_dict()
    own = {**engine.config.given(), "selector": told["selector"], "recompute_ratio": told["ratio"]}
    figures = ("quality", "ttft_seconds", "ttft_share", "compute_share")
    return Profile(
        name=name,
        model=engine.model_name,
        blend=BlendConfig(**own),
        lead_in=LeadInConfig(kind=best.rule.lead_in or engine.lead_in.kind),
        measured={
            **measured,
            "bar": bar.kind,
            "least": bar.least,
            **{figure: told[figure] for figure in figures},
            "quality_ci95": [best.low, best.high if math.isfinite(best.high) else 0.0],
            "engine": engine.name,
            "dtype": engine.dtype or "",
            "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
        },
    )


def mixed(data: EvalDataset, count: int) -> EvalDataset:
    """Return at most so many questions, of each setting in turn, so that any few are of all."""
    settings = [data.of_setting(setting) for setting in data.settings]
    turns = (one for turn in zip_longest(*settings) for one in turn if one is not None)
    return replace(data, questions=tuple(islice(turns, count)))


def tune_model(
    model: str,
    data: EvalDataset,
    *,
    bar: str = "score",
    rules: str = "",
    name: str = "tuned",
    resume: Path | None = None,
    on_prompt: Callable[[], None] = lambda: None,
    config: EngineConfig | None = None,
) -> Tuned:
    """Return the cheapest settings that keep a model's quality on some questions.

    Args:
        model: as for open_engine; it runs in the embedded engine.
        data: the questions.
        bar: ``score`` compares answers with gold answers, ``fidelity`` predictions with full
            prefill's; ``score=0.9`` keeps another share than 0.95.
        rules: selectors and ratios to try, such as ``hkvd=0.1,hkvd=0.2``; a fixed grid by default.
        name: of the profile.
        resume: a file in which each prompt's results are kept, and from which known ones are taken.
        on_prompt: called after each prompt.
        config: the engine's other settings; what is tried is laid over its ``blend``.

    Raises:
        ModelLoadError: when the model cannot be loaded.
        UnsupportedModelError: when its KV cannot be blended.
        ConfigError: when a setting is wrong, or full prefill answers no question.
        PromptError: when a prompt does not fit the model.
        DatasetError: when ``resume`` holds other things.
    """
    asked, log = Bar.read(bar), RecordLog.resumed(resume) if resume else None
    frame = PromptFrame.of(load_tokenizer(model), data.instruction)
    own = (config or EngineConfig()).with_changes(
        engine=EMBEDDED, model=model, instruction=frame.opening
    )
    with opened(own) as engine:
        tried = grid(engine, rules)
        return tune(engine, frame, data, tried, bar=asked, name=name, log=log, on_prompt=on_prompt)
