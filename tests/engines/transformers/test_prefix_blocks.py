"""Blocks of prompts are named by all tokens up to their end, and looked up few at a time."""

from __future__ import annotations

import random

from cacheblend_rag.engines.prefixes import BLOCK_TOKENS, PrefixKeys
from cacheblend_rag.kv.chunk_kv import chunk_id

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
