from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from cacheblend_rag.quality.scores import (
    bootstrap_interval,
    exact_match,
    holds_answer,
    normalize_answer,
    paired_interval,
    ratio_interval,
    token_f1,
)


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
def test_token_f1_and_exact_match_take_the_best_gold_answer(answer, golds, score):
    assert token_f1(answer, golds) == pytest.approx(score)
    assert exact_match(f"The {answer}.", golds) == float(score == 1)


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


def test_interval_of_a_share_is_close_to_the_normal_approximation():
    scores = [1.0] * 300 + [0.0] * 100
    low, high = bootstrap_interval(scores)
    half_width = 1.96 * (0.75 * 0.25 / 400) ** 0.5
    assert low == pytest.approx(0.75 - half_width, abs=0.01)
    assert high == pytest.approx(0.75 + half_width, abs=0.01)


def test_interval_repeats_and_needs_scores():
    scores = np.linspace(0, 1, 57).tolist()
    assert bootstrap_interval(scores) == bootstrap_interval(scores)
    assert bootstrap_interval([1.0] * 30) == (1.0, 1.0)
    with pytest.raises(ValueError, match="must"):
        bootstrap_interval([])


FIRST, SECOND = (0.1, 0.5, 0.4, 0.9), (0.2, 0.1, 0.3, 0.5)


def all_draws(figure):
    """A figure of all prompts that can be drawn with replacement, each draw once."""
    draws = product(range(len(FIRST)), repeat=len(FIRST))
    return [figure([FIRST[i] for i in d], [SECOND[i] for i in d]) for d in draws]


@pytest.mark.parametrize(
    ("interval", "figure"),
    [
        (paired_interval, lambda a, b: (sum(a) - sum(b)) / len(a)),
        (ratio_interval, lambda a, b: sum(a) / sum(b)),
    ],
)
def test_paired_intervals_are_those_of_all_draws(interval, figure):
    wanted = np.quantile(all_draws(figure), [0.025, 0.975])
    assert interval(FIRST, SECOND) == pytest.approx(wanted, rel=0.05)


def test_pairs_that_differ_by_the_same_have_an_interval_of_no_width():
    assert paired_interval([3, 5], [1, 3]) == (2.0, 2.0)
    assert ratio_interval([2, 6], [1, 3]) == (2.0, 2.0)
    assert ratio_interval([1, 1], [0, 1]) is None


@pytest.mark.parametrize(("first", "second"), [([], []), ([1.0], [1.0, 2.0])])
def test_pairs_must_be_pairs(first, second):
    with pytest.raises(ValueError, match="as many"):
        paired_interval(first, second)
