"""Prefix caching: the KV of prompt prefixes, in blocks of tokens.

A token's KV depends only on the tokens up to it. A block is stored under the hash of all tokens up
to its end, so its KV is exact in every prompt with the same prefix: it is neither rotated nor
recomputed. The lookup ends at the first block that is not stored. A block that was found, but then
cannot be read or is computed sooner, is computed, and those behind it are used all the same.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from cacheblend_rag.blend import FusedKV
from cacheblend_rag.kv.chunk_kv import (
    NAMESPACE_DIGITS,
    ChunkKV,
    KVKey,
    chunk_id,
    fingerprint,
    prefix_ids,
)
from cacheblend_rag.kv.store import TieredKVStore

BLOCK_TOKENS = 64
"""Tokens in a block; an incomplete last block is not stored."""


@dataclass(frozen=True, slots=True)
class PrefixKeys:
    """Makes the keys of prefix blocks, for one model and one namespace.

    fingerprint: never that of chunk KV, and independent of the lead-in.
    """

    fingerprint: str

    @classmethod
    def of(cls, identity: Mapping[str, Any], namespace: str) -> Self:
        """Return the keys for a model. identity: all that its KV depends on (model_identity)."""
        return cls(fingerprint({**identity, "prefix_block": BLOCK_TOKENS}, namespace))

    def salted(self, salt: str | None) -> PrefixKeys:
        """Return the keys of prompts with a ``cache_salt``, which no other prompts have."""
        if salt is None:
            return self
        own = fingerprint({"prefix_keys": self.fingerprint, "cache_salt": salt})
        return PrefixKeys(self.fingerprint[:NAMESPACE_DIGITS] + own[NAMESPACE_DIGITS:])

    def blocks(self, token_ids: Sequence[int]) -> list[KVKey]:
        """Return the keys of all complete blocks of a prefix, in order.

        A block's key is that of a chunk whose context is all tokens before it.
        """
        starts = range(0, len(token_ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS)
        return [
            KVKey(chunk_id(token_ids[start : start + BLOCK_TOKENS]), self.fingerprint, before)
            for start, before in zip(starts, prefix_ids(token_ids, starts), strict=True)
        ]


@dataclass(frozen=True, slots=True)
class StoredPrefix:
    """The longest run of stored blocks at the beginning of a prompt.

    keys: of these blocks, in order. began: when the lookup began (``time.perf_counter``). seconds:
    how long it took.
    """

    keys: Sequence[KVKey]
    began: float
    seconds: float

    @classmethod
    def find(cls, store: TieredKVStore, keys: Sequence[KVKey]) -> Self:
        """Look up 1, 2, 4, ... blocks at a time, until one is missing.

        So a prompt without a stored prefix costs one lookup, and a long prefix few round trips to a
        remote tier.
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
        """Number of tokens in these blocks."""
        return len(self.keys) * BLOCK_TOKENS


def block_kv(fused: FusedKV, block: int) -> ChunkKV:
    """Copy a block of a request's prefix, the first one being 0, to host memory."""
    start = block * BLOCK_TOKENS

    def copied(whole: torch.Tensor) -> torch.Tensor:
        part = whole[:, :, start : start + BLOCK_TOKENS]
        return part.detach().clone(memory_format=torch.contiguous_format).cpu()

    return ChunkKV(copied(fused.keys), copied(fused.values), position=start)
