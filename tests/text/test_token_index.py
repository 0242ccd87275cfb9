"""Runs of known token sequences are found in a prompt's tokens, the longest first."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheblend_rag.text.token_index import TokenIndex, TokenRun


def index_of(*sequences: list[int], least: int = 3) -> TokenIndex[int]:
    index = TokenIndex[int](least)
    for name, tokens in enumerate(sequences):
        index.add(tokens, name)
    return index


def found(sequences: list[list[int]], tokens: list[int], least: int = 3) -> list[TokenRun[int]]:
    return index_of(*sequences, least=least).find(tokens)


def text(seed: int, tokens: int) -> list[int]:
    """Tokens of which no eight in a row stand in another text."""
    draw = random.Random(seed)
    return [draw.randrange(50_000) for _ in range(tokens)]


def test_whole_sequences_are_found_wherever_they_stand() -> None:
    one, other = [1, 2, 3, 4], [5, 6, 7]
    assert found([one, other], [9, *other, 9, 9, *one]) == [
        TokenRun(1, 1, 4, 0),
        TokenRun(0, 6, 10, 0),
    ]


def test_a_sequence_that_stands_twice_is_found_twice() -> None:
    known = text(1, 100)
    assert found([known], [*known, 5, *known], 32) == [
        TokenRun(0, 0, 100, 0),
        TokenRun(0, 101, 201, 0),
    ]


def test_parts_are_found_and_both_sides_of_a_change() -> None:
    known = text(1, 200)
    assert found([known], [1, *known[70:150], 2], 32) == [TokenRun(0, 1, 81, 70)]
    edited = [*known[:100], 7, 8, *known[101:]]
    assert found([known], edited, 32) == [TokenRun(0, 0, 100, 0), TokenRun(0, 102, 201, 101)]


def test_the_longest_wins_and_then_the_first_sequence() -> None:
    short, long = [1, 2, 3], [1, 2, 3, 4]
    assert found([short, long], [1, 2, 3, 4, 9]) == [TokenRun(1, 0, 4, 0)]
    assert found([short, short], [1, 2, 3]) == [TokenRun(0, 0, 3, 0)]
    assert found([long, short], [0, 1, 2, 3, 0]) == [TokenRun(0, 1, 4, 0)]


def test_what_is_left_of_a_shorter_run_is_kept_if_it_is_long_enough() -> None:
    prompt = list(range(100, 120))
    long, left, right = prompt[4:16], prompt[:8], prompt[14:]
    assert found([left, long, right], prompt) == [
        TokenRun(0, 0, 4, 0),
        TokenRun(1, 4, 16, 0),
        TokenRun(2, 16, 20, 2),
    ]
    assert found([left, long, right], prompt, 5) == [TokenRun(1, 4, 16, 0)]


def test_nothing_shorter_than_the_least_and_nothing_outside_is_found() -> None:
    assert found([[1, 2, 3]], [1, 2, 9, 2, 3]) == []
    index = index_of([1, 2, 3, 4])
    assert index.find([1, 2, 3, 4], 1, 4) == [TokenRun(0, 1, 4, 1)]
    assert index.find([1, 2, 3, 4], 2, 4) == []
    assert index.find([]) == []
    assert TokenIndex[int]().find([1] * 40) == []


def test_a_name_is_added_once_and_forgotten_at_once() -> None:
    one, other = text(1, 40), text(2, 40)
    index = index_of(one, least=32)
    index.add(other, 0)
    assert index.tokens(0).tolist() == one
    assert (len(index), 0 in index, 1 in index) == (1, True, False)
    index.discard(0)
    index.discard(0)
    assert (len(index), 0 in index) == (0, False)
    assert index.find(one) == []
    index.add(other, 0)
    assert index.find([*one, *other]) == [TokenRun(0, 40, 80, 0)]
    with pytest.raises(KeyError):
        index.tokens(1)


known_tokens = st.lists(st.lists(st.integers(0, 3), max_size=30), max_size=6)


@given(known_tokens, st.lists(st.integers(0, 3), max_size=80), st.integers(1, 12))
def test_runs_are_equal_tokens_in_order_and_never_overlap(
    sequences: list[list[int]], tokens: list[int], least: int
) -> None:
    end = 0
    for run in found(sequences, tokens, least):
        assert run.start >= end
        assert run.end - run.start >= least
        there = sequences[run.name][run.skip : run.skip + run.end - run.start]
        assert tokens[run.start : run.end] == there
        end = run.end
