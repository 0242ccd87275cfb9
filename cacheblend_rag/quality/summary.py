"""Rows of an evaluation: one rule's records on all questions of a setting, added up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import mean, median
from typing import Any

from cacheblend_rag.quality.fidelity import Fidelity
from cacheblend_rag.quality.measure import Record, Rule
from cacheblend_rag.quality.scores import (
    bootstrap_interval,
    paired_interval,
    ratio_interval,
)

Interval = tuple[float, float]


@dataclass(frozen=True)
class Row:
    """One rule's figures on one setting; shares are from 0 to 1, intervals 95 % bootstrap ones.

    Args:
        setting: of the questions.
        lead_in: what chunks were computed after; ``none`` of ordinary prefill.
        selector: its name, or ``full`` for ordinary prefill, ``no_passages`` for that of the prompt
            without passages.
        ratio: of the recomputed tokens.
        default: whether these are the settings in force.
        exact_match: share of the answers that are a gold answer.
        ci95: its interval.
        f1: mean over answers of the words' F1.
        f1_kept: that over full prefill's, 0 if that is 0, with its interval; None as an interval
            if full prefill is right too seldom to tell.
        holds_answer: share of the answers that contain a gold answer.
        recomputed_share: recomputed chunk tokens of all chunk tokens.
        compute_share: work of the pass over all layers and the probe, as a share of full prefill's
            of the whole prompt; the mean.
        ttft_seconds: time to first token, the median.
        ttft_speedup: mean of full prefill's over the mean, with its interval.
        kl, kl_first, top1, same_answer: means of Fidelity's; None if predictions were not compared.
        gold_logprob: mean log-probability of the best gold answer.
        gold_logprob_change: that minus full prefill's, on the same prompts.
        recovered_kl: 1 - mean KL / mean KL of plain reuse behind the same lead-in; None where
            nothing is to be recovered.
        not_blended: why answers came from ordinary prefill although KV was to be blended, and how
            many.
    """

    setting: str
    lead_in: str
    selector: str
    ratio: float
    default: bool
    exact_match: float
    ci95: Interval
    f1: float
    f1_kept: float
    f1_kept_ci95: Interval | None
    holds_answer: float
    recomputed_share: float
    compute_share: float
    ttft_seconds: float
    ttft_speedup: float
    ttft_speedup_ci95: Interval | None
    kl: float | None = None
    kl_ci95: Interval | None = None
    kl_first: float | None = None
    top1: float | None = None
    same_answer: float | None = None
    gold_logprob: float | None = None
    gold_logprob_change: float | None = None
    gold_logprob_change_ci95: Interval | None = None
    recovered_kl: float | None = None
    recovered_kl_ci95: Interval | None = None
    not_blended: Mapping[str, int] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}


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
    exact = [one.exact for one in found]
    # Of the prompt without passages, the share of tokens stands for that of the work.
    shares = [
        one.compute_share * (one.prompt_tokens / whole.prompt_tokens)
        for one, whole in zip(found, full, strict=True)
    ]
    own, ordinary = ([one.ttft_seconds for one in records] for records in (found, full))
    f1, best = ([one.f1 for one in records] for records in (found, full))
    return Row(
        setting=setting,
        lead_in=rule.lead_in or "none",
        selector=rule.config.selector if rule.config else rule.name,
        ratio=rule.config.ratio if rule.config else 1.0,
        default=rule.name == "default",
        exact_match=mean(exact),
        ci95=bootstrap_interval(exact),
        f1=mean(f1),
        f1_kept=mean(f1) / mean(best) if any(best) else 0.0,
        f1_kept_ci95=ratio_interval(f1, best),
        holds_answer=mean(one.holds for one in found),
        recomputed_share=fresh / chunk_tokens if chunk_tokens else 1.0,
        compute_share=mean(shares),
        ttft_seconds=median(own),
        ttft_speedup=mean(ordinary) / mean(own) if any(own) else 1.0,
        ttft_speedup_ci95=ratio_interval(ordinary, own),
        not_blended=Counter(one.not_blended for one in found if one.not_blended) or None,
        **_fidelity(*(_told(records) for records in (found, full, reused))),
    )


def _told(records: Sequence[Record]) -> list[Fidelity]:
    return [one.fidelity for one in records if one.fidelity]


def _fidelity(
    own: Sequence[Fidelity], full: Sequence[Fidelity], reused: Sequence[Fidelity]
) -> dict[str, Any]:
    """Return the figures on predictions."""
    if not own:
        return {}
    kl, lost = [one.kl for one in own], [one.kl for one in reused]
    told: dict[str, Any] = {"kl": mean(kl), "kl_ci95": bootstrap_interval(kl)}
    for name in ("kl_first", "top1", "same_answer", "gold_logprob"):
        told[name] = _mean(own, name)
    mine, theirs = (
        [one.gold_logprob for one in of if one.gold_logprob is not None] for of in (own, full)
    )
    if mine:
        told["gold_logprob_change"] = mean(mine) - mean(theirs)
        told["gold_logprob_change_ci95"] = paired_interval(mine, theirs)
    if any(lost) and len(lost) == len(kl):
        ends = ratio_interval(kl, lost)
        told["recovered_kl"] = 1 - mean(kl) / mean(lost)
        told["recovered_kl_ci95"] = ends and (1 - ends[1], 1 - ends[0])
    return told


def _mean(own: Sequence[Fidelity], name: str) -> float | None:
    found = [float(value) for one in own if (value := getattr(one, name)) is not None]
    return mean(found) if found else None
