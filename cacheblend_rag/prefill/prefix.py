"""Prefixes: what prompts begin with, in blocks whose KV is exact in every prompt that has them.

A token's KV depends on the tokens up to it alone. So the KV of a block of a prompt's first tokens,
stored under the hash of all tokens up to the block's end, is that of any other prompt which begins
with the same tokens, at the same positions: nothing is rotated, nothing needs recomputing, and
blocks between others that are missing can be used, too.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from cacheblend_rag.blend import FusedKV
from cacheblend_rag.kv.chunk_kv import ChunkKV, KVKey, chunk_id, fingerprint, prefix_ids
from cacheblend_rag.kv.store import TieredKVStore

BLOCK_TOKENS = 64
"""Tokens of a block; what is left of a prompt after its last whole block is not stored."""


@dataclass(frozen=True, slots=True)
class PrefixKeys:
    """Names the blocks of one model's prompts, in one namespace.

    fingerprint: differs from that of any chunk KV; whatever the lead-in of chunks is, it is the
    same.
    """

    fingerprint: str

    @classmethod
    def of(cls, identity: Mapping[str, Any], namespace: str) -> Self:
        """Return the keys of a model; identity: everything its KV depends on (model_identity)."""
        return cls(fingerprint({**identity, "prefix_block": BLOCK_TOKENS}, namespace))

    def blocks(self, token_ids: Sequence[int]) -> list[KVKey]:
        """Return the keys of all whole blocks of these tokens, which begin a prompt.

        A block is a chunk whose context is all text before it.
        """
        starts = range(0, len(token_ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS)
        return [
            KVKey(chunk_id(token_ids[start : start + BLOCK_TOKENS]), self.fingerprint, before)
            for start, before in zip(starts, prefix_ids(token_ids, starts), strict=True)
        ]


@dataclass(frozen=True, slots=True)
class StoredPrefix:
    """The blocks that a prompt begins with and that are stored, up to the first that is not.

    began, seconds: when they were looked up (a reading of ``time.perf_counter``), and how long.
    """

    keys: Sequence[KVKey]
    began: float
    seconds: float

    @classmethod
    def find(cls, store: TieredKVStore, keys: Sequence[KVKey]) -> Self:
        """Look up one, two, four, ... blocks at once, until one is missing.

        So a prompt that begins like no other costs one lookup, and a long run few questions to a
        distant tier.
        """
        began, found, count = time.perf_counter(), 0, 1
        while found < len(keys):
            held = store.contains_many(keys[found : found + count])
            if not all(held):
                found += held.index(False)
                break
            found, count = found + len(held), 2 * count
        return cls(keys[:found], began, time.perf_counter() - began)

    @property
    def tokens(self) -> int:
        """Tokens of all of them."""
        return len(self.keys) * BLOCK_TOKENS


def block_kv(fused: FusedKV, index: int) -> ChunkKV:
    """Return a copy of a block of a prompt's KV, on the host."""
    start = index * BLOCK_TOKENS

    def copied(whole: torch.Tensor) -> torch.Tensor:
        part = whole[:, :, start : start + BLOCK_TOKENS]
        return part.detach().clone(memory_format=torch.contiguous_format).cpu()

    return ChunkKV(copied(fused.keys), copied(fused.values), position=start)
