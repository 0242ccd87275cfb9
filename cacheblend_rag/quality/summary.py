"""Rows of an evaluation: one rule's results on all questions of a setting, added up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import mean, median
from typing import Any

from cacheblend_rag.quality.fidelity import PromptFidelity
from cacheblend_rag.quality.metrics import (
    bootstrap_interval,
    mcnemar,
    paired_interval,
    ratio_interval,
)
from cacheblend_rag.quality.records import PromptRecord
from cacheblend_rag.quality.rules import BASELINES, FULL, Rule

Interval = tuple[float, float]
Results = Mapping[Rule, Sequence[PromptRecord]]
"""Every rule's results, in the order of the questions."""


@dataclass(frozen=True)
class FidelityRow:
    """One rule's fidelity to full prefill on one setting: means over prompts.

    Intervals are 95 % bootstrap intervals over prompts. kl_first, kl, top1, same_answer: as in
    PromptFidelity. gold_logprob: of the best gold answer; gold_logprob_mean per token;
    gold_logprob_change: minus full prefill's, on the same prompts. recovered_kl: 1 - mean KL / mean
    KL of nothing recomputed behind the same lead-in; None for a rule without a lead-in, or where
    nothing is to be recovered.
    """

    kl_first: float
    kl_first_ci95: Interval
    kl: float
    kl_ci95: Interval
    top1: float
    top1_ci95: Interval
    same_answer: float
    gold_logprob: float | None
    gold_logprob_mean: float | None
    gold_logprob_change: float | None
    gold_logprob_change_ci95: Interval | None
    recovered_kl: float | None
    recovered_kl_ci95: Interval | None


@dataclass(frozen=True)
class TtftRow:
    """Time to first token. ttft_seconds: the median. ttft_speedup: mean of full prefill / mean."""

    ttft_seconds: float
    ttft_speedup: float
    ttft_speedup_ci95: Interval | None


@dataclass(frozen=True)
class EvalRow:
    """One rule's scores on one setting; every figure is a share from 0 to 1 unless stated.

    selector: a selector's name, or ``full`` for ordinary prefill, ``no_context`` for that of the
    prompt without passages, ``prefix_caching``. default: whether these are an engine's own
    defaults. ci95: of exact_match. holds_answer: answers that contain a gold answer.
    holds_answer_p: p-value of McNemar's test against full prefill's. recomputed_share: recomputed
    chunk tokens of all chunk tokens. compute_share: work of the pass over all layers and the probe,
    as a share of full prefill's; the mean over questions; without passages, the share of tokens.
    """

    setting: str
    lead_in: str
    selector: str
    ratio: float
    default: bool
    exact_match: float
    f1: float
    rouge_l: float
    ci95: Interval
    holds_answer: float
    holds_answer_p: float
    recomputed_share: float
    compute_share: float
    fidelity: FidelityRow | None = None
    ttft: TtftRow | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values; fields of ``fidelity`` and ``ttft`` stand beside the others."""
        plain = asdict(self)
        for name in ("fidelity", "ttft"):
            plain.update(plain.pop(name) or {})
        return {k: list(v) if isinstance(v, tuple) else v for k, v in plain.items()}


def summarize(setting: str, results: Results) -> tuple[EvalRow, ...]:
    """Return a row per rule, paired with full prefill, which must be among them."""
    return tuple(_row(setting, rule, found, results) for rule, found in results.items())


def not_blended(results: Results) -> Counter[str]:
    """Return how many answers came from ordinary prefill although a rule asked, by reason."""
    found = (one for records in results.values() for one in records)
    return Counter(one.not_blended for one in found if one.not_blended is not None)


def _row(
    setting: str,
    rule: Rule,
    found: Sequence[PromptRecord],
    results: Results,
) -> EvalRow:
    full = results[FULL]
    chunk_tokens = sum(one.chunk_tokens for one in found)
    fresh = sum(one.fresh_tokens for one in found)
    exact = [one.exact for one in found]
    return EvalRow(
        setting=setting,
        lead_in=rule.lead_in,
        selector=rule.selector,
        ratio=rule.ratio,
        default=rule.is_default,
        exact_match=mean(exact),
        f1=mean(one.f1 for one in found),
        rouge_l=mean(one.rouge for one in found),
        ci95=bootstrap_interval(exact),
        holds_answer=mean(one.holds for one in found),
        holds_answer_p=mcnemar([bool(r.holds) for r in found], [bool(r.holds) for r in full]),
        recomputed_share=fresh / chunk_tokens if chunk_tokens else 1.0,
        compute_share=mean(one.compute_share for one in found),
        fidelity=_fidelity_row(rule, found, results),
        ttft=_ttft_row(found, full),
    )


def _ttft_row(found: Sequence[PromptRecord], full: Sequence[PromptRecord]) -> TtftRow | None:
    own, ordinary = ([r.ttft_seconds for r in one if r.ttft_seconds] for one in (found, full))
    if not own or len(own) != len(ordinary):
        return None
    return TtftRow(median(own), mean(ordinary) / mean(own), ratio_interval(ordinary, own))


def _fidelity_row(
    rule: Rule, found: Sequence[PromptRecord], results: Results
) -> FidelityRow | None:
    own = [one.fidelity for one in found if one.fidelity]
    if not own:
        return None
    return FidelityRow(
        **_means(own),
        **_gold(own, [one.fidelity for one in results[FULL] if one.fidelity]),
        **_recovered(rule, own, results),
    )


def _means(own: Sequence[PromptFidelity]) -> dict[str, Any]:
    told: dict[str, Any] = {"same_answer": mean(float(one.same_answer) for one in own)}
    for name in ("kl_first", "kl", "top1"):
        values = [getattr(one, name) for one in own]
        told |= {name: mean(values), f"{name}_ci95": bootstrap_interval(values)}
    return told


def _gold(own: Sequence[PromptFidelity], full: Sequence[PromptFidelity]) -> dict[str, Any]:
    """Return the gold answers' log-probabilities; every question has a gold answer, or none."""
    names = ("gold_logprob", "gold_logprob_mean", "gold_logprob_change", "gold_logprob_change_ci95")
    mine = [one.gold_logprob for one in own if one.gold_logprob is not None]
    theirs = [one.gold_logprob for one in full if one.gold_logprob is not None]
    if not mine:
        return dict.fromkeys(names)
    each = [one.gold_logprob_mean for one in own if one.gold_logprob_mean is not None]
    change = mean(mine) - mean(theirs)
    return dict(
        zip(names, (mean(mine), mean(each), change, paired_interval(mine, theirs)), strict=True)
    )


def _recovered(rule: Rule, own: Sequence[PromptFidelity], results: Results) -> dict[str, Any]:
    names = ("recovered_kl", "recovered_kl_ci95")
    reuse = Rule.reuse(rule.lead_in)
    lost = [one.fidelity.kl for one in results.get(reuse, ()) if one.fidelity]
    if rule in BASELINES or not any(lost):
        return dict.fromkeys(names)
    left = [one.kl for one in own]
    ends = ratio_interval(left, lost)
    interval = ends and (1 - ends[1], 1 - ends[0])
    return {names[0]: 1 - mean(left) / mean(lost), names[1]: interval}
