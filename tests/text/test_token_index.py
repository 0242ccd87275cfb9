"""Runs of known token sequences are found in others, the longest first."""

from __future__ import annotations

import random

from cacheblend_rag.text.token_index import TokenIndex, TokenRun


def found(sequences: list[list[int]], tokens: list[int], least: int = 3) -> list[TokenRun]:
    return list(TokenIndex(sequences, least).find(tokens, 0, len(tokens)))


def test_whole_sequences_are_found_wherever_they_stand() -> None:
    one, other = [1, 2, 3, 4], [5, 6, 7]
    assert found([one, other], [9, *other, 9, 9, *one]) == [
        TokenRun(1, 1, 4, 0),
        TokenRun(0, 6, 10, 0),
    ]


def test_a_sequence_with_a_changed_token_is_found_in_two_parts() -> None:
    assert found([[1, 2, 3, 4, 5, 6, 7]], [1, 2, 3, 0, 5, 6, 7]) == [
        TokenRun(0, 0, 3, 0),
        TokenRun(0, 4, 7, 4),
    ]


def test_the_longest_wins_and_then_the_first_sequence() -> None:
    short, long = [1, 2, 3], [1, 2, 3, 4]
    assert found([short, long], [1, 2, 3, 4, 9]) == [TokenRun(1, 0, 4, 0)]
    assert found([short, short], [1, 2, 3]) == [TokenRun(0, 0, 3, 0)]


def test_nothing_shorter_than_the_least_and_nothing_outside_is_found() -> None:
    assert found([[1, 2, 3]], [1, 2, 9, 2, 3]) == []
    index = TokenIndex([[1, 2, 3, 4]], 3)
    assert list(index.find([1, 2, 3, 4], 1, 4)) == [TokenRun(0, 1, 4, 1)]
    assert list(index.find([1, 2, 3, 4], 2, 4)) == []


def test_runs_are_equal_tokens_and_never_overlap() -> None:
    draw = random.Random(3)
    for _ in range(200):
        known = [[draw.randrange(4) for _ in range(draw.randrange(20))] for _ in range(4)]
        tokens = [draw.randrange(4) for _ in range(60)]
        end = 0
        for run in found(known, tokens):
            assert run.start >= end
            assert run.end - run.start >= 3
            there = known[run.sequence][run.skip : run.skip + run.end - run.start]
            assert tokens[run.start : run.end] == there
            end = run.end


def test_repetitive_tokens_take_no_longer() -> None:
    tokens = [7] * 4000
    runs = found([[7] * 3000] * 50, tokens, 8)
    assert [run.end - run.start for run in runs] == [3000, 1000]
