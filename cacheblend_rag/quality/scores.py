"""Scores of answers, and figures: means over prompts with their bootstrap intervals.

A score is a share from 0 to 1. With several gold answers the best one counts; without any, it is 0.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

Interval = tuple[float, float]
LEVEL, RESAMPLES = 0.95, 2000
"""Of intervals."""
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text: str) -> str:
    """Lower case, no ASCII punctuation, no English articles, single spaces (as SQuAD does)."""
    plain = text.lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", plain).split())


def token_f1(answer: str, golds: Sequence[str]) -> float:
    """Return the harmonic mean of precision and recall over normalized words, as bags."""
    return max((_f1(answer, gold) for gold in golds), default=0.0)


def holds_answer(answer: str, golds: Sequence[str]) -> bool:
    """Return whether the answer contains a gold answer's normalized words as a sequence."""
    told = f" {normalize_answer(answer)} "
    return any(f" {normalize_answer(gold)} " in told for gold in golds)


def _f1(answer: str, gold: str) -> float:
    found, wanted = normalize_answer(answer).split(), normalize_answer(gold).split()
    if not found or not wanted:
        return float(found == wanted)
    common = sum((Counter(found) & Counter(wanted)).values())
    return 2 * common / (len(found) + len(wanted))


class Figure(NamedTuple):
    """A figure of some prompts.

    value: None if it does not apply. interval: the 95 % bootstrap interval, drawn from whole
    prompts; None if too many of them are zero to tell it.
    """

    value: float | None = None
    interval: Interval | None = None

    def __format__(self, form: str) -> str:
        return "" if self.value is None else format(self.value, form)

    def between(self, form: str) -> str:
        """Return the interval as text, such as 0.10-0.25; "" if there is none."""
        return "-".join(format(end, form) for end in self.interval or ())


def recovered(own: Any, bare: Any, full: Any) -> Any:
    """Return (own - bare) / (full - bare): 0 is as without passages, 1 as by full prefill.

    own, bare, full: the score of a rule, without passages, of full prefill. Not finite if
    full <= bare.
    """
    return (own - bare) / (full - bare).clip(min=0)


def figure(of: Callable[..., Any], *columns: Sequence[float]) -> Figure:
    """Return a figure that is computed from means over prompts, such as their ratio.

    of: computes it from the mean of each column. columns: values of the same prompts, in order. The
    same values give the same interval. Raises ValueError when columns are not equally long.
    """
    import numpy as np

    values = np.array(columns, np.float64).T
    if not values.size:
        return Figure()
    count = len(values)
    draws = values[np.random.default_rng(0).integers(count, size=(RESAMPLES, count))]
    with np.errstate(divide="ignore", invalid="ignore"):
        value, drawn = of(*values.mean(0)), of(*draws.mean(1).T)
    if not np.isfinite(value):
        return Figure()
    if not np.isfinite(drawn).all():
        return Figure(float(value))
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Figure(float(value), (float(low), float(high)))
