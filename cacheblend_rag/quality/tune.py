"""``tune``: the cheapest settings that keep full prefill's quality on a user's questions."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, Literal

import torch

from cacheblend_rag.engines.base import Engine
from cacheblend_rag.engines.model_files import load_tokenizer
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.quality.dataset import DEFAULT_SETTING, EvalDataset, PromptFrame
from cacheblend_rag.quality.evaluate import Row, evaluate, opened, read_rules, reuse
from cacheblend_rag.quality.measure import ANSWER_TOKENS, FULL, NO_PASSAGES, RecordLog, Rule
from cacheblend_rag.quality.scores import Figure
from cacheblend_rag.settings import EMBEDDED, BlendConfig, EngineConfig, LeadInConfig, Profile

LEAST = 0.95
GRID = "question_mid=0.08,question_mid=0.16,question_mid=0.25,hkvd=0.08,hkvd=0.16,hkvd=0.25"


@dataclass(frozen=True)
class Bar:
    """What settings must keep of full prefill's quality.

    Args:
        kind: ``recovered`` is the share of the gold answers' log-probability that passages bring
            (see Row.recovered_logprob), of which the lower end of the interval counts;
            ``fidelity`` is exp(-mean KL), of which the mean itself does.
        least: the share.
    """

    kind: str = "recovered"
    least: float = LEAST

    @classmethod
    def read(cls, text: str) -> Bar:
        """Parse a quality bar, such as ``recovered`` or ``fidelity=0.9``.

        Raises ConfigError for another kind, or a share that is not above 0 and at most 1.
        """
        kind, _, least = text.partition("=")
        try:
            share = float(least or LEAST)
        except ValueError:
            share = math.nan
        if kind not in ("recovered", "fidelity") or not 0 < share <= 1:
            raise ConfigError(
                f"bar {text!r} must be recovered or fidelity, with a share up to 1: fidelity=0.95"
            )
        return cls(kind, share)

    def tried(self, rule: Rule, row: Row) -> Tried:
        """Return whether a rule holds it, by its row."""
        if self.kind == "fidelity":
            kept = _exp_of_negative(row.kl)
            counts = kept.value
        else:
            kept = row.recovered_logprob
            counts = kept.interval and kept.interval[0]
        is_sooner = (row.ttft_speedup.value or 0.0) > 1
        return Tried(rule, row, kept, is_sooner and (counts or 0.0) >= self.least)


def _exp_of_negative(kl: Figure) -> Figure:
    if kl.value is None or kl.interval is None:
        return Figure()
    low, high = kl.interval
    return Figure(math.exp(-kl.value), (math.exp(-high), math.exp(-low)))


@dataclass(frozen=True)
class Tried:
    """A rule and its figures.

    kept: the share of full prefill's quality. holds: whether it holds the bar and is sooner than
    full prefill.
    """

    rule: Rule
    row: Row
    kept: Figure
    holds: bool

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        layers = list(self.rule.config.check_layers) if self.rule.config else []
        return {
            **self.row.to_dict(),
            "check_layers": layers,
            "quality": self.kept.value,
            "quality_ci95": self.kept.interval and list(self.kept.interval),
            "holds": self.holds,
        }


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
        row = best.row
        told = f"{row.ttft_speedup:.1f} times sooner, {row.compute_share:.0%} of the work"
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


def tune_model(
    model: str,
    data: EvalDataset,
    *,
    bar: str = "recovered",
    rules: str = "",
    name: str = "tuned",
    max_tokens: int = ANSWER_TOKENS,
    resume: Path | None = None,
    on_prompt: Callable[[], None] = lambda: None,
    config: EngineConfig | None = None,
) -> Tuned:
    """Return the cheapest settings that keep a model's quality on some questions.

    Args:
        model: as for open_engine; it runs in the embedded engine.
        data: the questions.
        bar: ``recovered`` goes by the gold answers' probability, ``fidelity`` by predictions beside
            full prefill's; ``recovered=0.9`` keeps another share than 0.95.
        rules: selectors and ratios to try, such as ``hkvd=0.1,hkvd=0.2``; a fixed grid by default.
        name: of the profile.
        max_tokens: most tokens of an answer.
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
    wanted, log = Bar.read(bar), RecordLog.resumed(resume) if resume else None
    frame = PromptFrame.of(load_tokenizer(model), data.instruction)
    own = (config or EngineConfig()).with_changes(
        engine=EMBEDDED, model=model, instruction=frame.opening
    )
    with opened(own) as engine:
        base, lead_in = engine.config, engine.lead_in.kind
        tried = read_rules(rules or GRID, base, lead_in)
        if not rules:
            plain = [reuse(base, "instruction"), reuse(base, lead_in)]
            tried = list(dict.fromkeys([*plain, *tried]))
        rows = evaluate(
            engine, frame, data, [FULL, NO_PASSAGES, *tried],
            max_tokens=max_tokens, log=log, on_question=on_prompt,
        )  # fmt: skip
        if wanted.kind == "recovered" and rows[0].recovered_logprob.value is None:
            raise ConfigError(
                f"full prefill answered none of {len(data.questions)} questions: compare by --bar "
                "fidelity"
            )
        found = [wanted.tried(rule, row) for rule, row in zip(tried, rows[2:], strict=True)]
        found.sort(key=lambda one: -(one.row.ttft_speedup.value or 0.0))
        best = next((one for one in found if one.holds), None)
        count = len(data.questions)
        about = {"dataset": data.name, "prompts": count, "bar": wanted.kind, "least": wanted.least}
        profile = _profile(best, engine, name, about) if best else None
    return Tuned(wanted, found, profile, data.name, count)


def _profile(best: Tried, engine: Engine, name: str, about: dict[str, Any]) -> Profile:
    row = best.row
    own = {**engine.config.given(), "selector": row.selector, "recompute_ratio": row.ratio}
    return Profile(
        name=name,
        model=engine.model_name,
        blend=BlendConfig(**own),
        lead_in=LeadInConfig(kind=best.rule.lead_in or engine.lead_in.kind),
        measured={
            **about,
            "quality": best.kept.value,
            "quality_ci95": list(best.kept.interval or ()),
            "ttft_seconds": row.ttft_seconds,
            "ttft_speedup": row.ttft_speedup.value,
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
