"""``tune``: the cheapest settings that keep full prefill's quality on a user's questions."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, Literal, cast

import torch

from cacheblend_rag.engines.base import Engine
from cacheblend_rag.engines.model_files import load_tokenizer
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.quality.dataset import DEFAULT_SETTING, EvalDataset, PromptFrame
from cacheblend_rag.quality.evaluate import GRID, evaluate, opened, read_rules, reuse
from cacheblend_rag.quality.measure import FULL, RecordLog, Rule
from cacheblend_rag.quality.summary import Row
from cacheblend_rag.settings import EMBEDDED, BlendConfig, EngineConfig, LeadInConfig, Profile

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
        """Parse a bar such as ``score`` or ``fidelity=0.9``; raises ConfigError."""
        kind, _, least = text.partition("=")
        try:
            return cls(cast("BarKind", kind), float(least or LEAST))
        except ValueError as error:
            raise ConfigError(f"bar {text!r} must be KIND=SHARE, such as fidelity=0.95") from error

    def tried(self, rule: Rule, row: Row) -> Tried:
        """Return whether a rule holds it, by its row."""
        low, high = row.f1_kept_ci95 or (0.0, 1.0)
        quality, counts = row.f1_kept, low
        if self.kind == "fidelity":
            kl = math.inf if row.kl is None else row.kl
            near, far = row.kl_ci95 or (kl, kl)
            quality, low, high = (math.exp(-one) for one in (kl, far, near))
            counts = quality
        holds = counts >= self.least and row.ttft_speedup > 1
        return Tried(rule, row, quality, (low, high), holds)


@dataclass(frozen=True)
class Tried:
    """A rule and its figures.

    quality: the share of full prefill's that it keeps, with its interval. holds: whether it holds
    the bar and is sooner than full prefill.
    """

    rule: Rule
    row: Row
    quality: float
    interval: tuple[float, float]
    holds: bool

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        quality = {"quality": self.quality, "quality_ci95": list(self.interval)}
        layers = list(self.rule.config.check_layers) if self.rule.config else []
        return {**self.row.to_dict(), "check_layers": layers, **quality, "holds": self.holds}


@dataclass(frozen=True)
class Tuned:
    """What was found.

    Args:
        bar: what had to be kept.
        tried: each rule's figures, the one with the earliest first token first.
        profile: the cheapest settings that hold the bar; None if nothing does.
        dataset: the name of the questions.
        prompts: how many there were.
    """

    bar: Bar
    tried: Sequence[Tried]
    profile: Profile | None
    dataset: str
    prompts: int

    @property
    def outcome(self) -> Literal["recompute", "plain reuse", "do not blend"]:
        """``plain reuse`` if that is enough."""
        if self.profile is None:
            return "do not blend"
        return "plain reuse" if self.profile.blend.selector == "none" else "recompute"

    @property
    def advice(self) -> str:
        """One line: what to do."""
        best = next((one for one in self.tried if one.holds), None)
        if best is None:
            return (
                f"do not blend this model on such questions: nothing keeps {self.bar.least:g} of "
                "full prefill's quality sooner than it"
            )
        told = f"{best.row.ttft_speedup:.1f} times sooner, {best.row.compute_share:.0%} of the work"
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
            "candidates": [one.to_dict() for one in self.tried],
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
        data: the questions, all in one setting.
        rules: to try.
        bar: what to keep.
        name: of the profile.
        log: as for measure.
        on_prompt: called after each.

    Raises:
        ConfigError: if full prefill answers no question right, and the bar is the score.
        PromptError: when a prompt does not fit the model.
    """
    rows = evaluate(engine, frame, data, [FULL, *rules], log=log, on_question=on_prompt)
    count = len(data.questions)
    if bar.kind == "score" and not rows[0].f1:
        raise ConfigError(
            f"full prefill answered none of {count} questions: compare by --bar fidelity"
        )
    tried = [bar.tried(rule, row) for rule, row in zip(rules, rows[1:], strict=True)]
    tried.sort(key=lambda one: -one.row.ttft_speedup)
    best = next((one for one in tried if one.holds), None)
    measured = {"dataset": data.name, "prompts": count, "bar": bar.kind, "least": bar.least}
    profile = None if best is None else _profile(best, engine, name, measured)
    return Tuned(bar, tried, profile, data.name, count)


def _profile(best: Tried, engine: Engine, name: str, measured: dict[str, Any]) -> Profile:
    row = best.row
    own = {**engine.config.given(), "selector": row.selector, "recompute_ratio": row.ratio}
    return Profile(
        name=name,
        model=engine.model_name,
        blend=BlendConfig(**own),
        lead_in=LeadInConfig(kind=best.rule.lead_in or engine.lead_in.kind),
        measured={
            **measured,
            "quality": best.quality,
            "quality_ci95": list(best.interval),
            "ttft_seconds": row.ttft_seconds,
            "ttft_speedup": row.ttft_speedup,
            "compute_share": row.compute_share,
            "engine": engine.name,
            "dtype": engine.dtype or "",
            "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
        },
    )


def mixed(data: EvalDataset, count: int) -> EvalDataset:
    """Return at most so many questions, of each setting in turn, as one setting."""
    settings = [data.of_setting(setting) for setting in data.settings]
    turns = (one for turn in zip_longest(*settings) for one in turn if one is not None)
    chosen = (replace(one, setting=DEFAULT_SETTING) for one in islice(turns, count))
    return replace(data, questions=tuple(chosen))


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
