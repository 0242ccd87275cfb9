"""Scores answers: exact match, token F1; intervals, also of paired figures.

Every score is a share from 0 to 1. With several gold answers the best one counts; without any,
scores are 0.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

LEVEL, RESAMPLES = 0.95, 2000
"""Of intervals."""
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


def holds_answer(answer: str, golds: Sequence[str]) -> bool:
    """Return whether the answer contains a gold answer's normalized words as a sequence."""
    return _best(_holds, answer, golds) == 1.0


def bootstrap_interval(scores: Sequence[float]) -> tuple[float, float]:
    """Return the percentile bootstrap confidence interval (95 %) of the mean score.

    scores: one score per question. The same scores give the same interval; scores that are all
    equal give an interval of width zero.
    Raises ValueError when there are no scores.
    """
    if not len(scores):
        raise ValueError("scores=[] must hold at least one score")
    return _quantiles(_resampled_means(scores)[:, 0])


def paired_interval(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    """Return the percentile bootstrap confidence interval of the mean of ``first - second``.

    first, second: values of the same prompts, in order; whole prompts are drawn.
    Raises ValueError when there are none, or not as many of each.
    """
    means = _paired_means(first, second)
    return _quantiles(means[:, 0] - means[:, 1])


def ratio_interval(first: Sequence[float], second: Sequence[float]) -> tuple[float, float] | None:
    """Return the interval of ``mean(first) / mean(second)``; as paired_interval.

    None when ``second`` holds so many zeros that its mean may be zero.
    """
    means = _paired_means(first, second)
    return _quantiles(means[:, 0] / means[:, 1]) if means[:, 1].all() else None


def _paired_means(first: Sequence[float], second: Sequence[float]) -> np.ndarray:
    if not len(first) or len(first) != len(second):
        raise ValueError(f"{len(first)} and {len(second)} values must be as many, at least one")
    return _resampled_means(first, second)


def _resampled_means(*columns: Sequence[float]) -> np.ndarray:
    """Return the means of prompts drawn with replacement, (resamples, columns)."""
    import numpy as np

    values = np.stack([np.asarray(one, np.float64) for one in columns], axis=1)
    rng, count = np.random.default_rng(0), len(values)
    return np.stack([values[rng.integers(count, size=count)].mean(0) for _ in range(RESAMPLES)])


def _quantiles(means: np.ndarray) -> tuple[float, float]:
    import numpy as np

    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def _best(score: Callable[[str, str], float], answer: str, golds: Sequence[str]) -> float:
    return max((score(answer, gold) for gold in golds), default=0.0)


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
