"""Runs of known token sequences are found in a prompt's tokens, the longest first."""

from __future__ import annotations

import random
from itertools import chain, cycle, islice
from threading import Event, Thread

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheblend_rag.text import token_index
from cacheblend_rag.text.runs import Ids, Run, equal_runs
from cacheblend_rag.text.token_index import COMPARED_TOKENS, LEAST_COMPARED, Match, TokenIndex


def index_of(*sequences: list[int], least: int = 3) -> TokenIndex[int]:
    index = TokenIndex[int](least)
    for name, tokens in enumerate(sequences):
        index.add([(tokens, name)])
    return index


def match(name: int, start: int, end: int, skip: int) -> Match[int]:
    return Match(name, (Run(start, end, skip),))


def found(sequences: list[list[int]], tokens: list[int], least: int = 3) -> list[Match[int]]:
    return index_of(*sequences, least=least).find(tokens)


def text(seed: int, tokens: int) -> list[int]:
    """Tokens of which no eight in a row stand in another text."""
    draw = random.Random(seed)
    return [draw.randrange(50_000) for _ in range(tokens)]


def test_a_name_is_added_once_and_forgotten_at_once() -> None:
    one, other = text(1, 40), text(2, 40)
    index = index_of(one, least=32)
    index.add([(other, 0)])
    assert index.tokens(0).tolist() == one
    index.discard(0)
    index.discard(0)
    assert index.find(one) == []
    index.add([(other, 0)])
    assert index.find([*one, *other]) == [match(0, 40, 80, 0)]
    with pytest.raises(KeyError):
        index.tokens(1)


def test_added_together_or_one_by_one_the_same_is_found() -> None:
    texts = [text(seed, 90) for seed in range(40)]
    prompt = [token for known in texts[::-1] for token in known[9:]]
    together = TokenIndex[int]()
    together.add((known, name) for name, known in enumerate(texts))
    one_by_one = index_of(*texts, least=32)
    wanted = [match(39 - at, 81 * at, 81 * at + 81, 9) for at in range(40)]
    assert together.find(prompt) == one_by_one.find(prompt) == wanted
    for name in range(1, 40):
        one_by_one.discard(name)
    assert one_by_one.find(prompt) == wanted[-1:]
    assert one_by_one.find(prompt[:-81]) == []


def test_threads_search_while_one_changes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_index, "LEAST_GONE", 16)
    texts = [text(seed, 64) for seed in range(600)]
    index = index_of(*texts[:10], least=32)
    known = [match(name, 64 * name, 64 * name + 64, 0) for name in range(10)]
    prompt = [token for one in texts[:10] for token in one]
    wrong, done = list[object](), Event()

    def search() -> None:
        while not done.is_set():
            if (found := index.find(prompt)) != known:
                wrong.append(found)

    searching = Thread(target=search)
    searching.start()
    try:
        for name in range(10, 600):
            index.add([(texts[name], name)])
            assert index.find(texts[name]) == [match(name, 0, 64, 0)]
            if name % 3:
                index.discard(name)
                assert index.find(texts[name]) == []
    finally:
        done.set()
        searching.join()
    assert wrong == []


def test_repetitions_of_few_tokens_are_no_anchors() -> None:
    known = [*[7] * 500, *text(1, 60)]
    index = index_of(known, [7, 8] * 300, least=32)
    assert index.find([7] * 4000) == index.find([7, 8] * 500) == []
    assert index.find([*[7] * 4000, *text(1, 60)]) == [match(0, 3500, 4060, 0)]


def hostile_prompts(texts: list[list[int]]) -> dict[str, list[int]]:
    windows = [known[at : at + 8] for known in texts for at in range(0, len(known) - 8, 25)]
    parts = {
        "anchors of one": windows[:40],
        "anchors of all": windows,
        "parts that are long enough": [known[:33] for known in texts],
        "one that repeats": [list(range(5))],
    }
    return {kind: list(islice(cycle(chain(*some)), 20_000)) for kind, some in parts.items()}


@pytest.mark.parametrize("kind", hostile_prompts([text(1, 400)]))
def test_a_search_compares_a_bounded_number_of_tokens(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [*(text(seed, 1000) for seed in range(50)), *[list(range(5)) * 200] * 20]
    index = index_of(*texts, least=32)
    compared = list[int]()

    def counting(prompt: Ids, own: Ids, shift: int, *, least: int) -> list[Run]:
        overlap = min(prompt.size, shift + own.size) - max(shift, 0)
        compared.append(max(overlap, LEAST_COMPARED))
        return equal_runs(prompt, own, shift, least=least)

    monkeypatch.setattr(token_index, "equal_runs", counting)
    hostile = hostile_prompts(texts[:50])[kind]
    prompt = [*hostile, *texts[3]]
    found = index.find(prompt)
    assert 0 < sum(compared) <= COMPARED_TOKENS + 4 * len(prompt)
    assert match(3, len(hostile), len(prompt), 0) in found


known_tokens = st.lists(st.lists(st.integers(0, 9), max_size=25), min_size=1, max_size=4)


@st.composite
def sequences_and_prompt(draw: st.DrawFn) -> tuple[list[list[int]], list[int]]:
    """Sequences, and a prompt of parts of them and other tokens."""
    sequences, prompt = draw(known_tokens), list[int]()
    for _ in range(draw(st.integers(0, 5))):
        known = draw(st.sampled_from(sequences))
        start = draw(st.integers(0, len(known)))
        prompt += known[start : draw(st.integers(start, len(known)))]
        prompt += draw(st.lists(st.integers(0, 12), max_size=3))
    return sequences, prompt


def naive_runs(known: list[int], prompt: list[int], least: int) -> list[tuple[int, int, int]]:
    """Return start, end and skip of all runs of ``least`` equal tokens, as long as can be."""
    runs = []
    for shift in range(-len(known), len(prompt)):
        start = None
        for at in range(shift, shift + len(known) + 1):
            inside = 0 <= at < len(prompt) and at - shift < len(known)
            if inside and prompt[at] == known[at - shift]:
                start = at if start is None else start
            elif start is not None:
                if at - start >= least:
                    runs.append((start, at, start - shift))
                start = None
    return runs


def is_rich(tokens: list[int], least: int) -> bool:
    window = 8 if least >= 8 else 4
    windows = [tokens[at : at + window] for at in range(len(tokens) - window + 1)]
    return all(len(set(one)) >= window // 2 for one in windows)


@given(sequences_and_prompt(), st.integers(4, 12))
def test_what_a_naive_search_finds_is_found(
    given: tuple[list[list[int]], list[int]], least: int
) -> None:
    sequences, prompt = given
    runs = found(sequences, prompt, least)
    end = 0
    for one in runs:
        assert one.start >= end
        assert one.tokens >= least
        for run in one.runs:
            there = sequences[one.name][run.skip : run.skip + run.tokens]
            assert prompt[run.start : run.end] == there
        end = one.end
    naive = [
        (stop - start, start, stop)
        for known in sequences
        for start, stop, _ in naive_runs(known, prompt, least)
        if is_rich(prompt[start:stop], least)
    ]
    longest = max((length for length, _, _ in naive), default=0)
    assert max((one.tokens + token_index.WHOLE for one in runs), default=0) >= longest
    is_found = np.zeros(len(prompt), np.bool_)
    for run in (run for one in runs for run in one.runs):
        is_found[run.start : run.end] = True
    for length, start, stop in naive:  # what is left of it, if anything, is shorter than least
        left = np.flatnonzero(np.concatenate([[True], is_found[start:stop], [True]]))
        assert max(np.diff(left)) - 1 < least, (length, start, stop)
