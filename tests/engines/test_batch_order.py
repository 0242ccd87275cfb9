"""Prompts that share chunks follow each other, and none waits longer than it may."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import chain

from hypothesis import given, settings
from hypothesis import strategies as st

from cacheblend_rag.engines.batch_order import (
    GROUPS_AHEAD,
    MOST_TOGETHER,
    MOST_WAIT,
    Chunks,
    OverlapQueue,
    by_overlap,
)
from tests.kv.samples import make_key

KEYS = [make_key(number) for number in range(200)]


def chunks(*numbers: int, tokens: int = 10) -> Chunks:
    return {KEYS[number]: tokens for number in numbers}


PROMPTS = st.lists(
    st.dictionaries(st.sampled_from(KEYS[:12]), st.integers(1, 500), max_size=5), max_size=90
)


@given(prompts=PROMPTS, most=st.integers(1, 9), most_wait=st.integers(0, 6))
@settings(max_examples=200, deadline=None)
def test_no_prompt_waits_longer_than_it_may(
    prompts: list[Chunks], most: int, most_wait: int
) -> None:
    order = by_overlap(prompts, most=most, most_wait=most_wait)
    assert sorted(order) == list(range(len(prompts)))
    assert all(place <= index + most * most_wait for place, index in enumerate(order))


@given(prompts=PROMPTS, left=st.sets(st.integers(0, 90)), most=st.integers(1, 4))
@settings(max_examples=100, deadline=None)
def test_those_that_leave_hold_up_nobody(prompts: list[Chunks], left: set[int], most: int) -> None:
    queue = OverlapQueue[int](most)
    for index, wanted in enumerate(prompts):
        queue.add(index, wanted)
    for index in left & set(queue):
        queue.remove(index)
    order = [queue.pop() for _ in range(len(queue))]
    assert sorted(order) == [index for index in range(len(prompts)) if index not in left]
    assert not queue._count


def test_the_wait_is_used_up_by_a_prompt_that_shares_nothing() -> None:
    """It is passed by as often as it may be, and no more often."""
    prompts = [chunks(0), chunks(1)] + [chunks(0)] * (20 * MOST_TOGETHER)
    assert by_overlap(prompts).index(1) == MOST_WAIT * MOST_TOGETHER + 1


def test_prompts_that_share_nothing_keep_their_order() -> None:
    assert by_overlap([]) == []
    assert by_overlap([chunks(3, 4), chunks(), chunks(1), chunks(2)]) == [0, 1, 2, 3]


def test_those_that_share_chunks_stand_together() -> None:
    prompts = [chunks(1, 2), chunks(8, 9), chunks(2, 1), chunks(5), chunks(9, 8), chunks(1, 2)]
    assert by_overlap(prompts, most=3) == [0, 2, 5, 1, 4, 3]


def test_chunks_count_by_their_tokens() -> None:
    prompts = [
        {KEYS[0]: 400, KEYS[1]: 20, KEYS[2]: 20},
        {KEYS[1]: 20, KEYS[2]: 20},
        {KEYS[0]: 400},
    ]
    assert by_overlap(prompts, most=2) == [0, 2, 1]


def test_a_chunk_that_all_have_counts_less() -> None:
    prompts = [chunks(0, 1), *[chunks(0, 10 + number) for number in range(6)], chunks(1)]
    assert by_overlap(prompts, most=2)[:2] == [0, 7]


def test_a_group_begins_with_what_the_last_one_loaded() -> None:
    prompts = [chunks(0, 1), chunks(0, 1), chunks(5), chunks(1)]
    assert by_overlap(prompts, most=2) == [0, 1, 3, 2]


def test_only_the_oldest_of_a_long_queue_are_compared() -> None:
    ahead = MOST_TOGETHER * GROUPS_AHEAD
    apart = [chunks(1 + number) for number in range(ahead + MOST_TOGETHER)]
    first = slice(MOST_TOGETHER)
    assert len(apart) + 1 not in by_overlap([chunks(0), *apart, chunks(0)])[first]
    assert ahead in by_overlap([chunks(0), *apart[: ahead - 1], chunks(0)])[first]


def loads(prompts: Sequence[Chunks], order: Iterable[int], room: int) -> int:
    """Count the chunks that a cache of the ``room`` last used ones lacks."""
    cache, count = OrderedDict[object, None](), 0
    for key in chain(*(prompts[index] for index in order)):
        count += key not in cache
        cache[key] = None
        cache.move_to_end(key)
        if len(cache) > room:
            cache.popitem(last=False)
    return count


def test_topics_load_each_chunk_once() -> None:
    """The cache keeps the last four chunks; every fifth prompt is about the same topic."""
    for seed in range(5):
        rng = random.Random(seed)
        topics = [chunks(*rng.sample(range(10 * t, 10 * t + 3), 2)) for t in range(5)]
        prompts = topics * 6
        assert loads(prompts, range(30), 4) == 60
        assert loads(prompts, by_overlap(prompts), 4) == 10
