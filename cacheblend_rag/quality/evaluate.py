"""``eval``: full prefill, plain reuse, random rows and selectors answer the same questions."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, fields
from operator import sub, truediv
from statistics import mean, median
from typing import Any

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
from cacheblend_rag.quality.scores import Figure, figure, recovered
from cacheblend_rag.settings import VLLM, BlendConfig, EngineConfig, LeadInKind

CPU_KV_SPACE, CPU_KV_GIB = "VLLM_CPU_KVCACHE_SPACE", "2"
"""Memory for vLLM's KV on a CPU, if nothing else is said."""


def rule_of(selector: str, ratio: float, base: BlendConfig, lead_in: LeadInKind) -> Rule:
    """Return the rule that recomputes a share of tokens.

    base: what its settings are laid over; its options of a selector are those of this one only.
    """
    config = base.with_selector(selector).with_changes(recompute_ratio=ratio, **BLEND_ALWAYS)
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
            raise ConfigError(f"rule {part!r} must be SELECTOR=RATIO, such as hkvd=0.15") from error
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


@dataclass(frozen=True)
class Row:
    """One rule's figures on one setting; shares are from 0 to 1.

    Args:
        setting: of the questions.
        lead_in: what chunks were computed after; ``none`` of ordinary prefill.
        selector: its name, or ``full`` for ordinary prefill, ``no_passages`` for that of the prompt
            without passages.
        ratio: of the recomputed tokens.
        default: whether these are the settings in force.
        recomputed_share: recomputed chunk tokens of all chunk tokens.
        compute_share: work of the pass over all layers and the probe, as a share of full prefill's
            of the whole prompt; the mean.
        early_kv_bytes: of stored KV, read before layer 0; the mean.
        ttft_seconds: time to first token, the median.
        ttft_speedup: mean of full prefill's over the mean.
        f1: mean over answers of the words' F1.
        holds_answer: share of the answers that contain a gold answer.
        kl, top1, same_answer, gold_logprob: means of Fidelity's, where predictions were compared.
        gold_logprob_change: gold_logprob minus full prefill's, on the same prompts.
        recovered_f1, recovered_holds, recovered_logprob: how much of what passages bring a rule
            keeps: (rule - no passages) / (full prefill - no passages), a ratio of sums over the
            prompts that full prefill answers with a gold answer; of F1, of holding a gold answer,
            and of gold_logprob.
        recovered_kl: 1 - mean KL / mean KL of plain reuse behind the same lead-in.
        not_blended: why answers came from ordinary prefill although KV was to be blended, and how
            many.
    """

    setting: str
    lead_in: str
    selector: str
    ratio: float
    default: bool
    recomputed_share: float
    compute_share: float
    early_kv_bytes: float
    ttft_seconds: float
    ttft_speedup: Figure
    f1: Figure
    holds_answer: Figure
    kl: Figure
    top1: Figure
    same_answer: Figure
    gold_logprob: Figure
    gold_logprob_change: Figure
    recovered_f1: Figure
    recovered_holds: Figure
    recovered_logprob: Figure
    recovered_kl: Figure
    not_blended: Mapping[str, int] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values; a figure's interval stands beside it, as ``..._ci95``."""
        plain: dict[str, Any] = {}
        for name in (field.name for field in fields(self)):
            value = getattr(self, name)
            plain[name] = value.value if isinstance(value, Figure) else value
            if isinstance(value, Figure):
                plain[f"{name}_ci95"] = value.interval and list(value.interval)
        return plain


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
    return [row for setting, records in found.items() for row in _summarized(setting, records)]


def _summarized(setting: str, results: Mapping[Rule, Sequence[Record]]) -> list[Row]:
    """Return a row per rule. results: full prefill's first, each in the order of the questions."""
    full = next(iter(results.values()))
    bare = results.get(NO_PASSAGES, ())
    reused = {
        rule.lead_in: records
        for rule, records in results.items()
        if rule.config and rule.config.selector == "none"
    }
    return [
        _row(setting, rule, found, (full, bare, reused.get(rule.lead_in, ())))
        for rule, found in results.items()
    ]


def _row(
    setting: str,
    rule: Rule,
    found: Sequence[Record],
    beside: tuple[Sequence[Record], ...],
) -> Row:
    """Return one rule's metrics: means over all prompts, with bootstrap confidence intervals.

    beside: the records of full prefill, of no passages and of plain reuse, on the same questions.
    """
    full, bare, reused = beside
    chunk_tokens = sum(one.chunk_tokens for one in found)
    fresh = sum(one.fresh_tokens for one in found)
    # Of the prompt without passages, the share of tokens stands for that of the work.
    shares = [
        one.compute_share * (one.prompt_tokens / whole.prompt_tokens)
        for one, whole in zip(found, full, strict=True)
    ]
    seconds, ordinary = ([one.ttft_seconds for one in records] for records in (found, full))
    answered = [
        (one, without, whole)
        for one, without, whole in zip(found, bare, full, strict=False)
        if whole.holds
    ]
    compared = tuple(zip(*answered, strict=True))
    return Row(
        setting=setting,
        lead_in=rule.lead_in or "none",
        selector=rule.config.selector if rule.config else rule.name,
        ratio=rule.config.ratio if rule.config else 1.0,
        default=rule.name == "default",
        recomputed_share=fresh / chunk_tokens if chunk_tokens else 1.0,
        compute_share=mean(shares),
        early_kv_bytes=mean(one.early_kv_bytes for one in found),
        ttft_seconds=median(seconds),
        ttft_speedup=figure(truediv, ordinary, seconds),
        f1=figure(_itself, [one.f1 for one in found]),
        holds_answer=figure(_itself, [one.holds for one in found]),
        kl=figure(_itself, *_compared("kl", found)),
        top1=figure(_itself, *_compared("top1", found)),
        same_answer=figure(_itself, *_compared("same_answer", found)),
        gold_logprob=figure(_itself, *_compared("gold_logprob", found)),
        gold_logprob_change=figure(sub, *_compared("gold_logprob", found, full)),
        recovered_f1=figure(recovered, *([one.f1 for one in each] for each in compared)),
        recovered_holds=figure(recovered, *([one.holds for one in each] for each in compared)),
        recovered_logprob=figure(recovered, *_compared("gold_logprob", *compared)),
        recovered_kl=figure(lambda own, lost: 1 - own / lost, *_compared("kl", found, reused)),
        not_blended=Counter(one.not_blended for one in found if one.not_blended) or None,
    )


def _itself(mean: float) -> float:
    return mean


def _compared(name: str, *rules: Sequence[Record]) -> list[tuple[float, ...]]:
    """Return each rule's values of a field of Fidelity, on the prompts that all have one of."""
    values = ([getattr(one.fidelity, name, None) for one in records] for records in rules)
    known = (prompt for prompt in zip(*values, strict=False) if None not in prompt)
    return list(zip(*known, strict=True))


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
