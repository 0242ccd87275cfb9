"""Rows of an evaluation: one rule's figures on all questions of a setting."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from operator import sub, truediv
from statistics import mean, median
from typing import Any

from cacheblend_rag.quality.measure import Record, Rule
from cacheblend_rag.quality.scores import Figure, figure


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
        ttft_seconds: time to first token, the median.
        ttft_speedup: mean of full prefill's over the mean.
        f1: mean over answers of the words' F1.
        f1_kept: that over full prefill's.
        holds_answer: share of the answers that contain a gold answer.
        kl, top1, same_answer, gold_logprob: means of Fidelity's, where predictions were compared.
        gold_logprob_change: gold_logprob minus full prefill's, on the same prompts.
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
    ttft_seconds: float
    ttft_speedup: Figure
    f1: Figure
    f1_kept: Figure
    holds_answer: Figure
    kl: Figure
    top1: Figure
    same_answer: Figure
    gold_logprob: Figure
    gold_logprob_change: Figure
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


def summarize(setting: str, results: Mapping[Rule, Sequence[Record]]) -> list[Row]:
    """Return a row per rule. results: full prefill's first, each in the order of the questions."""
    full = next(iter(results.values()))
    reused = {
        rule.lead_in: records
        for rule, records in results.items()
        if rule.config and rule.config.selector == "none"
    }
    return [
        _row(setting, rule, found, full, reused.get(rule.lead_in, ()) if rule.config else ())
        for rule, found in results.items()
    ]


def _row(
    setting: str,
    rule: Rule,
    found: Sequence[Record],
    full: Sequence[Record],
    reused: Sequence[Record],
) -> Row:
    chunk_tokens = sum(one.chunk_tokens for one in found)
    fresh = sum(one.fresh_tokens for one in found)
    # Of the prompt without passages, the share of tokens stands for that of the work.
    shares = [
        one.compute_share * (one.prompt_tokens / whole.prompt_tokens)
        for one, whole in zip(found, full, strict=True)
    ]
    seconds, ordinary = ([one.ttft_seconds for one in records] for records in (found, full))
    f1, best = ([one.f1 for one in records] for records in (found, full))
    return Row(
        setting=setting,
        lead_in=rule.lead_in or "none",
        selector=rule.config.selector if rule.config else rule.name,
        ratio=rule.config.ratio if rule.config else 1.0,
        default=rule.name == "default",
        recomputed_share=fresh / chunk_tokens if chunk_tokens else 1.0,
        compute_share=mean(shares),
        ttft_seconds=median(seconds),
        ttft_speedup=figure(truediv, ordinary, seconds),
        f1=figure(_itself, f1),
        f1_kept=figure(truediv, f1, best),
        holds_answer=figure(_itself, [one.holds for one in found]),
        kl=figure(_itself, *_compared("kl", found)),
        top1=figure(_itself, *_compared("top1", found)),
        same_answer=figure(_itself, *_compared("same_answer", found)),
        gold_logprob=figure(_itself, *_compared("gold_logprob", found)),
        gold_logprob_change=figure(sub, *_compared("gold_logprob", found, full)),
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
