"""``eval``: full prefill, plain reuse, random rows and selectors answer the same questions."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager

from cacheblend_rag.blend.selectors import make_selector
from cacheblend_rag.engines.base import Engine
from cacheblend_rag.engines.factory import open_engine
from cacheblend_rag.engines.model_files import quiet_libraries
from cacheblend_rag.errors import ConfigError, UnsupportedModelError
from cacheblend_rag.quality.dataset import EvalDataset, PromptFrame
from cacheblend_rag.quality.measure import (
    ANSWER_TOKENS,
    BLEND_ALWAYS,
    FULL,
    NO_PASSAGES,
    Record,
    RecordLog,
    Rule,
    measure,
)
from cacheblend_rag.quality.summary import Row, summarize
from cacheblend_rag.settings import VLLM, BlendConfig, EngineConfig, LeadInKind

PAPER = "hkvd=0.15"
"""The rule of CacheBlend's paper."""
GRID = "question_mid=0.08,question_mid=0.16,question_mid=0.25,hkvd=0.08,hkvd=0.16,hkvd=0.25"
"""What `tune` tries."""
CPU_KV_SPACE, CPU_KV_GIB = "VLLM_CPU_KVCACHE_SPACE", "2"
"""Memory for vLLM's KV on a CPU, if nothing else is said."""


def rule_of(selector: str, ratio: float, base: BlendConfig, lead_in: LeadInKind) -> Rule:
    """Return the rule that recomputes a share of tokens.

    base: what its settings are laid over; its options of a selector are those of this one only.
    """
    config = base.with_changes(
        selector=selector,
        recompute_ratio=ratio,
        selector_options=base.selector_options if selector == base.selector else {},
        **BLEND_ALWAYS,
    )
    name = "reuse" if selector == "none" else f"{selector}={ratio:g}"
    return Rule(f"{lead_in} {name}", config, lead_in)


def reuse(base: BlendConfig, lead_in: LeadInKind) -> Rule:
    """Return plain reuse: nothing is recomputed."""
    return rule_of("none", 0.0, base, lead_in)


def read_rules(text: str, base: BlendConfig, lead_in: LeadInKind) -> list[Rule]:
    """Return the rules of a text such as ``hkvd=0.15,question_mid=0.08``.

    Raises ConfigError for an unknown selector or an invalid ratio.
    """
    found = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        selector, _, ratio = part.partition("=")
        make_selector(selector)
        try:
            share = float(ratio)
        except ValueError as error:
            raise ConfigError(f"rule {part!r} must be SELECTOR=RATIO, such as {PAPER}") from error
        found.append(rule_of(selector, share, base, lead_in))
    return list(dict.fromkeys(found))


def beside(
    rules: Sequence[Rule], base: BlendConfig, lead_in: LeadInKind, *, exact: bool
) -> list[Rule]:
    """Return the rules, and what they are held against.

    These are full prefill, the prompt without passages, plain reuse behind the instruction and
    behind the lead-in, as many rows drawn at random, and the settings in force, named ``default``
    (also where one of the rules has the same). exact: whether the model runs in float32; otherwise
    recomputing everything shows what rounding alone does.
    """
    own = Rule("default", base.with_changes(**BLEND_ALWAYS), lead_in)
    ratios = dict.fromkeys(one.config.ratio for one in (*rules, own) if one.config)
    first = reuse(base, "instruction")
    found = [FULL, NO_PASSAGES, first, reuse(base, lead_in)]
    found += [rule_of("random", ratio, base, lead_in) for ratio in ratios if ratio > 0]
    found += [one for one in rules if one.config != own.config]
    found += [own, *([] if exact else [rule_of("all", 1.0, base, lead_in)])]
    return list(dict.fromkeys(found))


def evaluate(
    engine: Engine,
    frame: PromptFrame,
    data: EvalDataset,
    rules: Sequence[Rule],
    *,
    max_tokens: int = ANSWER_TOKENS,
    log: RecordLog | None = None,
    on_question: Callable[[], None] = lambda: None,
) -> list[Row]:
    """Return a row per setting and rule.

    Args:
        engine: with the frame's opening as its instruction.
        frame: of the prompts.
        data: the questions.
        rules: full prefill first.
        max_tokens: most tokens of an answer.
        log: as for measure.
        on_question: called after each.

    Raises:
        PromptError: when a question does not fit the model; it names the question.
    """
    found: dict[str, dict[Rule, list[Record]]] = {
        setting: {rule: [] for rule in rules} for setting in data.settings
    }
    prompts = map(frame.to_measure, data.questions)
    told = measure(engine, prompts, rules, max_tokens=max_tokens, stop=frame.stop, log=log)
    for question, measured in zip(data.questions, told, strict=True):
        for rule in rules:
            found[question.setting][rule].append(measured[rule.name].record)
        on_question()
    return [row for setting, records in found.items() for row in summarize(setting, records)]


@contextmanager
def opened(config: EngineConfig) -> Iterator[Engine]:
    """Open an engine whose model can be blended; it is closed when the block is left.

    Raises UnsupportedModelError when the model's KV cannot be blended, and the errors of
    open_engine.
    """
    quiet_libraries()
    if config.engine == VLLM:
        os.environ.setdefault(CPU_KV_SPACE, CPU_KV_GIB)
    with closing(open_engine(config)) as engine:
        if engine.blend_refusal:
            why = engine.blend_refusal
            raise UnsupportedModelError(f"model={config.model!r} cannot be blended: {why}")
        yield engine
