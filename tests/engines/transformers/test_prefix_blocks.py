"""Blocks of prompts are named by all tokens up to their end, and looked up few at a time."""

from __future__ import annotations

import random
import time

import pytest

from cacheblend_rag import TieredKVStore
from cacheblend_rag.engines.prefixes import BLOCK_TOKENS, PrefixKeys, StoredPrefix
from cacheblend_rag.kv.chunk_kv import chunk_id
from tests.kv.samples import CountingTier, make_kv

IDENTITY = {"weights": "some"}
KEYS = PrefixKeys.of(IDENTITY, "default")


def tokens(count: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(1 << 17) for _ in range(count)]


def test_a_key_is_of_all_tokens_up_to_the_blocks_end() -> None:
    ids = tokens(5 * BLOCK_TOKENS)
    whole = KEYS.blocks(ids)
    assert len(set(whole)) == 5
    assert KEYS.blocks(ids[: 2 * BLOCK_TOKENS]) == whole[:2]
    for changed in range(0, len(ids), 41):
        other = KEYS.blocks([*ids[:changed], ids[changed] + 1, *ids[changed + 1 :]])
        same = changed // BLOCK_TOKENS
        assert other[:same] == whole[:same]
        assert not set(other[same:]) & set(whole)
    assert whole[0].chunk_id == chunk_id(ids[:BLOCK_TOKENS])
    assert whole[3].context_id == chunk_id(ids[: 3 * BLOCK_TOKENS])


@pytest.mark.parametrize(("stored", "asked"), [(0, 1), (2, 3), (7, 15), (20, 20)])
def test_blocks_are_looked_up_until_one_is_missing(stored: int, asked: int) -> None:
    tier, keys = CountingTier(), KEYS.blocks(tokens(20 * BLOCK_TOKENS))
    with TieredKVStore([tier]) as store:
        for key in (*keys[:stored], *keys[stored + 1 :]):
            store.put(key, make_kv())
        tier.lookups.clear()
        began = time.perf_counter()
        found = StoredPrefix.find(store, keys)
        assert found.keys == keys[:stored]
        assert found.tokens == stored * BLOCK_TOKENS
        starts = [(block.start, block.end) for block in found.placed]
        assert starts == [(at * BLOCK_TOKENS, (at + 1) * BLOCK_TOKENS) for at in range(stored)]
        assert tier.lookups == keys[:asked]
        assert began <= found.began <= found.began + found.seconds <= time.perf_counter()
