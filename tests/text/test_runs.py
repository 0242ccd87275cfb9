"""A chunk's run in a prompt's tokens is the longest there is near the expected place."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cacheblend_rag.text.runs import EDGES, SLACK, Run, find_run

FILL = 99
"""A token that stands in no chunk."""

tokens = st.lists(st.integers(0, 3), max_size=12)
words = st.lists(st.integers(0, 3), min_size=1, max_size=12)


def find(prompt: list[int], chunk: list[int], near: int = 0, after: int = 0) -> Run | None:
    return find_run(np.array(prompt, np.int64), np.array(chunk, np.int64), near, after)


def slowly(prompt: list[int], chunk: list[int], near: int, after: int) -> int:
    """The best of all runs: its length, less how far off the expected place it is."""
    return max(
        (
            length - abs(shift)
            for shift in range(-SLACK, SLACK + 1)
            for skip in range(len(chunk))
            for length in range(1, len(chunk) - skip + 1)
            if near + shift + skip >= after
            and prompt[near + shift + skip :][:length] == chunk[skip : skip + length]
        ),
        default=0,
    )


@given(tokens, words, tokens, st.integers(-3, 3))
def test_a_chunk_that_stands_in_the_prompt_is_found(
    before: list[int], chunk: list[int], after: list[int], off: int
) -> None:
    prompt = [*before, *chunk, *after]
    run = find(prompt, chunk, len(before) + off)
    assert run is not None
    assert run.tokens >= len(chunk) - abs(off)
    assert prompt[run.start : run.end] == chunk[run.skip : run.skip + run.tokens]


@given(tokens, words, st.integers(0, 8), st.integers(0, 8))
def test_no_other_run_is_better(prompt: list[int], chunk: list[int], near: int, after: int) -> None:
    run = find(prompt, chunk, near, after)
    best = slowly(prompt, chunk, near, after)
    if run is None:
        assert best < max(1, min(len(chunk) / 2, len(chunk) - EDGES))
        return
    assert run.start >= after
    assert prompt[run.start : run.end] == chunk[run.skip : run.skip + run.tokens]
    off = abs(run.start - run.skip - near)
    assert run.tokens - off == best or run.tokens == len(chunk)


def test_edges_that_are_tokenized_otherwise_are_left_out() -> None:
    chunk = [10, 11, 12, 13, 14, 15]
    assert find([1, FILL, 12, 13, 14, FILL, 2], chunk) == Run(2, 5, 2)
    assert find([1, 2, 3, FILL, 11, 12, 13, 14, 15], chunk, 3) == Run(4, 9, 1)


def test_two_tokens_that_became_one_move_what_follows() -> None:
    chunk = [10, 11, 12, 13, 14, 15, 16, 17]
    assert find([FILL, 12, 13, 14, 15, 16, 17], chunk) == Run(1, 7, 2)


def test_a_chunk_of_which_hardly_anything_stands_there_is_not_found() -> None:
    chunk = list(range(20))
    assert find([*range(4), *[FILL] * 20], chunk) is None
    assert find([FILL] * 20, chunk) is None
    assert find([], [1]) is None
    assert find([1, 2], []) is None


def test_of_equal_runs_the_nearest_one_is_taken() -> None:
    assert find([7, 8, FILL, 7, 8, FILL, 7, 8], [7, 8], 3) == Run(3, 5)
    assert find([7, 8, FILL, 7, 8, FILL, 7, 8], [7, 8], 3, after=5) == Run(6, 8)
