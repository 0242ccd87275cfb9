"""Prefix caching: looks up and stores the KV of prompt prefixes, on threads beside the model's.

A token's KV depends only on the tokens up to it. A block is stored under the hash of all tokens up
to its end, so its KV is exact in every prompt with the same prefix: it is neither rotated nor
recomputed. The lookup ends at the first block that is not stored. A block that was found, but then
cannot be read or is computed sooner, is computed, and those behind it are used all the same.

From a prompt's first known passage on, blocks come from prompts that were computed in full, and
from idle time, once the same passages began an earlier prompt. They are kept in memory only, and
dropped when any passage is deleted.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from threading import Lock
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch

from cacheblend_rag.blend import FusedKV
from cacheblend_rag.engines.prepare import BLOCK_TOKENS
from cacheblend_rag.kv.chunk_kv import ChunkKV, KVKey, chunk_id, fingerprint, prefix_ids
from cacheblend_rag.kv.store import TieredKVStore
from cacheblend_rag.kv.writer import Writer
from cacheblend_rag.prefill.lead_in import PlacedChunk

logger = logging.getLogger(__name__)

LOOKUP_THREADS = 32
"""The prefixes of so many prompts are looked up at the same time."""
MOST_WAITING, LEAST_BLOCKS, MOST_AGAIN = 4, 6, 8192
"""Most beginnings of prompts that wait to be computed in idle time; fewest blocks and most tokens
of one with passages: a shorter one is blended about as fast."""
MOST_BLOCKS, MOST_COUNTED = 1 << 14, 1 << 12
"""Most blocks with passages of a store; beginnings of prompts, after which counting begins anew."""


@dataclass(frozen=True, slots=True)
class PrefixKeys:
    """Makes the keys of prefix blocks, for one model and one namespace.

    fingerprint: never that of chunk KV, and independent of the lead-in.
    """

    fingerprint: str

    @classmethod
    def of(cls, identity: Mapping[str, Any], namespace: str, salt: str | None = None) -> Self:
        """Return the keys for a model, by all that its KV depends on, and for a ``cache_salt``."""
        own = {"prefix_block": BLOCK_TOKENS, "cache_salt": salt}
        return cls(fingerprint({**identity, **own}, namespace))

    def blocks(self, token_ids: Sequence[int]) -> list[KVKey]:
        """Return the keys of all complete blocks of a prefix, in order.

        A block's key is that of a chunk whose context is all tokens before it.
        """
        starts = range(0, len(token_ids) - BLOCK_TOKENS + 1, BLOCK_TOKENS)
        return [
            KVKey(chunk_id(token_ids[start : start + BLOCK_TOKENS]), self.fingerprint, before)
            for start, before in zip(starts, prefix_ids(token_ids, starts), strict=True)
        ]


class PassageBlocks:
    """The prefix blocks of one store that hold tokens of known passages, or stand after some.

    deletions: of passages so far; a block that was computed before the last one is not kept.
    """

    def __init__(self) -> None:
        self.keys, self.deletions, self._lock = dict[KVKey, None](), 0, Lock()

    def put(self, store: TieredKVStore, key: KVKey, kv: ChunkKV, deletions: int) -> None:
        """Keep a block instead of the oldest one; deletions: before it was computed."""
        with self._lock:
            if deletions == self.deletions:
                self.keys[key] = None
                store.put(key, kv, in_memory=True)
                if len(self.keys) > MOST_BLOCKS:
                    store.forget([oldest := next(iter(self.keys))])
                    del self.keys[oldest]

    def drop(self, store: TieredKVStore) -> None:
        """Drop all blocks, since a passage is deleted."""
        with self._lock:
            self.deletions += 1
            store.forget(self.keys)
            self.keys = {}


_passages: WeakKeyDictionary[TieredKVStore, PassageBlocks] = WeakKeyDictionary()
"""Those of each store: engines around it share them."""


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
    def placed(self) -> list[PlacedChunk]:
        """The blocks, each at its place in the prompt."""
        size = BLOCK_TOKENS
        return [
            PlacedChunk(key, at * size, (at + 1) * size, is_exact=True, is_block=True)
            for at, key in enumerate(self.keys)
        ]

    @property
    def tokens(self) -> int:
        """Number of tokens in these blocks."""
        return len(self.keys) * BLOCK_TOKENS


class Beginnings:
    """Counts how often prompts began with the same passages."""

    def __init__(self) -> None:
        self._counts = Counter[object]()

    def come_again(self, beginning: object, tokens: int) -> bool:
        """Count a prompt's beginning; returns whether it is worth computing in idle time.

        That is at the second time, and, if it was not kept, at the fourth, eighth and so on.

        Args:
            beginning: what stands for its tokens and for who may share them.
            tokens: how many there are up to the last passage.
        """
        if not LEAST_BLOCKS * BLOCK_TOKENS <= tokens <= MOST_AGAIN:
            return False
        if len(self._counts) > MOST_COUNTED:
            self._counts.clear()
        self._counts[beginning] = count = self._counts[beginning] + 1
        return count > 1 and count.bit_count() == 1


class Prefixes:
    """The stored blocks of prompts' prefixes; no request waits for a write, or fails with one.

    store: where they are kept, within its capacity. namespace: whose prompts share them. A
    request's blocks are dropped while too many bytes wait; the next request with the same prefix
    offers them again. passages: see PassageBlocks.
    """

    def __init__(self, store: TieredKVStore, namespace: str) -> None:
        self._store, self._namespace = store, namespace
        self._lookups = ThreadPoolExecutor(LOOKUP_THREADS, "cacheblend-lookup")
        self._writer = Writer()
        self.passages = _passages.setdefault(store, PassageBlocks())
        self._beginnings = Beginnings()

    def keys(self, identity: Mapping[str, Any], salt: str | None) -> PrefixKeys | None:
        """Return the maker of a prompt's block keys; None if stored KV is not exact.

        identity: all that the model's KV depends on. salt: of prompts that share blocks with those
        of the same one alone.
        """
        if self._store.precision != "native":
            return None
        return PrefixKeys.of(identity, self._namespace, salt)

    def find(self, keys: Sequence[KVKey], own: int) -> Future[StoredPrefix] | None:
        """Look up a prompt's blocks, in order; None once the interpreter ends.

        own: how many come before its first passage.
        """
        keys = [*keys[:own], *takewhile(self.passages.keys.__contains__, keys[own:])]
        try:
            return self._lookups.submit(StoredPrefix.find, self._store, keys)
        except RuntimeError:
            return None

    def comes_again(self, keys: Sequence[KVKey], tokens: int) -> bool:
        """Count a prompt's beginning, see Beginnings; it is worth nothing without memory for it."""
        has_memory = not all(tier.durable for tier in self._store.tiers)
        return has_memory and self._beginnings.come_again(tuple(keys[-1:]), tokens)

    def put(self, keys: Sequence[KVKey], fused: FusedKV, own: int, deletions: int) -> None:
        """Queue those blocks of a request's prefix that are not stored yet.

        keys: of its blocks, in order. fused: the request's KV, which must not be written to any
        more. own: how many come before its first passage. deletions: of passages, before it began.
        """
        keys = keys if len(keys) >= LEAST_BLOCKS else keys[:own]
        size = fused.keys.nbytes + fused.values.nbytes
        if keys and self._writer.has_room(size):
            with suppress(RuntimeError):  # closed meanwhile
                self._writer.submit(size, partial(self._write, keys, [fused], own, deletions))

    def drain(self) -> None:
        """Wait until all queued blocks are written."""
        self._writer.drain()

    def close(self) -> None:
        """Write all queued blocks, and end the threads."""
        self._lookups.shutdown(wait=False, cancel_futures=True)
        self._writer.close(wait=True)

    def _write(
        self, keys: Sequence[KVKey], source: list[FusedKV], own: int, deletions: int
    ) -> None:
        """Copy the missing blocks and store them; only this frame references the request's KV.

        The last block is stored first: if the store evicts the oldest ones, the first blocks stay,
        without which the later ones would not be found.
        """
        try:
            fused = source.pop()
            held = self._store.contains_many(keys)
            missing = [block for block in reversed(range(len(keys))) if not held[block]]
            copies: Iterable[ChunkKV] = (block_kv(fused, block) for block in missing)
            if fused.keys.device.type != "cpu":  # free the device's memory before a slow tier
                copies = list(copies)
                del fused
            for block, kv in zip(missing, copies, strict=True):
                if block < own:
                    self._store.put(keys[block], kv)
                else:
                    self.passages.put(self._store, keys[block], kv, deletions)
        except Exception:
            logger.warning("the KV of a prompt's prefix is not stored", exc_info=True)


def block_kv(fused: FusedKV, block: int) -> ChunkKV:
    """Copy a block of a request's prefix, the first one being 0, to host memory."""
    start = block * BLOCK_TOKENS
    parts = [whole[:, :, start : start + BLOCK_TOKENS] for whole in (fused.keys, fused.values)]
    return ChunkKV(torch.stack(parts, 1).detach().cpu(), position=start)
