"""Scores answers: exact match, token F1, Rouge-L, and a bootstrap confidence interval.

Every score is a share from 0 to 1. With several gold answers the best one counts.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from cacheblend_rag.errors import MissingExtraError

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text: str) -> str:
    """Lower case, no ASCII punctuation, no English articles, single spaces (as SQuAD does)."""
    plain = text.lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", plain).split())


def exact_match(answer: str, golds: Sequence[str]) -> float:
    """Return 1.0 when the normalized answer equals a normalized gold answer, else 0.0."""
    return _best(_exact, answer, golds)


def token_f1(answer: str, golds: Sequence[str]) -> float:
    """Return the harmonic mean of precision and recall over normalized words, as bags."""
    return _best(_f1, answer, golds)


def rouge_l(answer: str, golds: Sequence[str]) -> float:
    """Return the Rouge-L F-measure (longest common subsequence of stemmed words).

    Raises MissingExtraError without the package rouge-score, which the extra ``eval`` brings.
    """
    return _best(_rouge_l, answer, golds)


def holds_answer(answer: str, golds: Sequence[str]) -> bool:
    """Return whether the answer contains a gold answer's normalized words as a sequence."""
    return _best(_holds, answer, golds) == 1.0


def bootstrap_interval(
    scores: Sequence[float], *, level: float = 0.95, resamples: int = 2000, seed: int = 0
) -> tuple[float, float]:
    """Return the percentile bootstrap confidence interval of the mean score.

    scores: one score per question. level: coverage, above 0 and below 1. The same seed gives the
    same interval; scores that are all equal give an interval of width zero.
    Raises ValueError when there are no scores or the level is out of range.
    """
    if not len(scores):
        raise ValueError("scores=[] must hold at least one score")
    if not 0 < level < 1:
        raise ValueError(f"level={level!r} must be above 0 and below 1")
    values = np.asarray(scores, dtype=np.float64)
    rng = np.random.default_rng(seed)
    means = [rng.choice(values, values.size).mean() for _ in range(resamples)]
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def _best(score: Callable[[str, str], float], answer: str, golds: Sequence[str]) -> float:
    if not golds:
        raise ValueError("golds=[] must hold at least one gold answer")
    return max(score(answer, gold) for gold in golds)


def _exact(answer: str, gold: str) -> float:
    return float(normalize_answer(answer) == normalize_answer(gold))


def _holds(answer: str, gold: str) -> float:
    return float(f" {normalize_answer(gold)} " in f" {normalize_answer(answer)} ")


def _f1(answer: str, gold: str) -> float:
    found, wanted = normalize_answer(answer).split(), normalize_answer(gold).split()
    if not found or not wanted:
        return float(found == wanted)
    common = sum((Counter(found) & Counter(wanted)).values())
    return 2 * common / (len(found) + len(wanted))


def _rouge_l(answer: str, gold: str) -> float:
    return float(rouge_scorer().score(gold, answer)["rougeL"].fmeasure)


@cache
def rouge_scorer() -> Any:
    """Return the scorer of ROUGE-L; raises MissingExtraError without its package."""
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        raise MissingExtraError("Rouge-L", "eval") from error
    return RougeScorer(["rougeL"], use_stemmer=True)
