from __future__ import annotations

from itertools import product
from operator import sub, truediv
from statistics import mean

import numpy as np
import pytest

from cacheblend_rag.quality.scores import figure, holds_answer, normalize_answer, token_f1


@pytest.mark.parametrize(
    ("text", "normalized"),
    [
        (" The  Eiffel-Tower! ", "eiffeltower"),
        ("a cat, an owl and the dog", "cat owl and dog"),
        ("Theatre", "theatre"),
        ("1,969", "1969"),
        ("", ""),
    ],
)
def test_normalization_drops_case_punctuation_and_articles(text, normalized):
    assert normalize_answer(text) == normalized


@pytest.mark.parametrize(
    ("answer", "golds", "score"),
    [
        # found 4 words, wanted 3, 2 in common: precision 2/4, recall 2/3, F1 4/7
        ("red car in town", ["red car here"], 4 / 7),
        # words count as often as they stand: 2 of 'red' in common of 3 and 2 words
        ("red red blue", ["red red"], 4 / 5),
        ("red", ["blue"], 0.0),
        ("the", ["a"], 1.0),
        ("", ["red"], 0.0),
        ("red car", ["blue", "red car"], 1.0),
    ],
)
def test_token_f1_takes_the_best_gold_answer(answer, golds, score):
    assert token_f1(answer, golds) == pytest.approx(score)


@pytest.mark.parametrize(
    ("answer", "golds", "held"),
    [
        ("It is named after Ernst Mach.", ["Ernst Mach"], True),
        ("the lungs", ["The Lungs"], True),
        ("Ernst said so to Mach", ["Ernst Mach"], False),
        ("Machine", ["Mach"], False),
        ("Triton", ["Nereid", "Triton"], True),
        ("", ["Triton"], False),
        ("red", [], False),
    ],
)
def test_an_answer_holds_gold_words_one_after_another(answer, golds, held):
    assert holds_answer(answer, golds) is held


def itself(mean):
    return mean


def test_the_interval_of_a_share_is_close_to_the_normal_approximation():
    share = figure(itself, [1.0] * 300 + [0.0] * 100)
    half_width = 1.96 * (0.75 * 0.25 / 400) ** 0.5
    assert share.value == 0.75
    assert share.interval == pytest.approx((0.75 - half_width, 0.75 + half_width), abs=0.01)
    assert (f"{share:.1f}", share.between(".2f")) == ("0.8", "0.71-0.79")


FIRST, SECOND = (0.1, 0.5, 0.4, 0.9), (0.2, 0.1, 0.3, 0.5)


def all_draws(of):
    """A figure of all prompts that can be drawn with replacement, each draw once."""
    draws = product(range(len(FIRST)), repeat=len(FIRST))
    return [of(mean(FIRST[i] for i in d), mean(SECOND[i] for i in d)) for d in draws]


@pytest.mark.parametrize("of", [sub, truediv])
def test_paired_intervals_are_those_of_all_draws(of):
    found = figure(of, FIRST, SECOND)
    assert found == figure(of, FIRST, SECOND)
    assert found.value == pytest.approx(of(mean(FIRST), mean(SECOND)))
    assert found.interval == pytest.approx(np.quantile(all_draws(of), [0.025, 0.975]), rel=0.05)


@pytest.mark.parametrize(
    ("of", "columns", "value", "interval"),
    [
        (itself, [[1.0] * 30], 1.0, (1.0, 1.0)),
        (sub, [[3, 5], [1, 3]], 2.0, (2.0, 2.0)),
        (truediv, [[2, 6], [1, 3]], 2.0, (2.0, 2.0)),
        (truediv, [[1, 1], [0, 1]], 2.0, None),
        (truediv, [[1, 1], [0, 0]], None, None),
        (itself, [], None, None),
    ],
)
def test_a_figure_that_does_not_apply_has_no_value(of, columns, value, interval):
    assert figure(of, *columns) == (value, interval)


def test_columns_must_be_of_the_same_prompts():
    with pytest.raises(ValueError, match="inhomogeneous"):
        figure(sub, [1.0], [1.0, 2.0])
