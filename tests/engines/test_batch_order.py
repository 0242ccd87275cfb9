"""Prompts of a batch that share chunks stand next to each other."""

from __future__ import annotations

import random

import pytest

from cacheblend_rag.engines.batch_order import grouped
from cacheblend_rag.kv.chunk_kv import KVKey
from tests.kv.samples import make_key


def keys(*numbers: int) -> list[KVKey]:
    return [make_key(number) for number in numbers]


def test_prompts_that_share_nothing_keep_their_order() -> None:
    assert grouped([]) == []
    assert grouped([keys(3, 4), keys(), keys(1), keys(2, 2)]) == [0, 1, 2, 3]


def test_those_that_share_chunks_are_near() -> None:
    prompts = [keys(1, 2), keys(8, 9), keys(2, 1), keys(5), keys(9, 8), keys(1, 2)]
    assert grouped(prompts) == [3, 0, 2, 5, 1, 4]


def test_every_prompt_has_one_place() -> None:
    rng = random.Random(3)
    prompts = [keys(*rng.choices(range(12), k=rng.randrange(5))) for _ in range(60)]
    assert sorted(grouped(prompts)) == list(range(60))


@pytest.mark.parametrize("seed", range(5))
def test_a_small_cache_reads_less_than_in_the_order_given(seed: int) -> None:
    """The cache keeps the last four chunks; every fifth prompt is about the same topic."""
    rng = random.Random(seed)
    prompts = [keys(*rng.sample(range(10 * topic, 10 * topic + 3), 2)) for topic in range(5)] * 6

    def reads(order: list[int]) -> int:
        cache: list[KVKey] = []
        count = 0
        for key in (key for index in order for key in prompts[index]):
            count += key not in cache
            cache = [*(one for one in cache if one != key), key][-4:]
        return count

    assert reads(list(range(len(prompts)))) == 60
    assert reads(grouped(prompts)) == 10
