"""Checks stored chunks and reports those that cannot be used."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from cacheblend_rag.kv.chunk_kv import KVKey
from cacheblend_rag.kv.store import TieredKVStore
from cacheblend_rag.reason import Reason
from cacheblend_rag.report import code_of


def unreadable(store: TieredKVStore, keys: Iterable[KVKey]) -> Iterator[tuple[KVKey, Reason]]:
    """Read chunks one by one, and yield those that stay in the store though they cannot be read.

    Damaged chunks are quarantined when they are read, so they are not yielded.

    Args:
        store: where they are read.
        keys: chunks, stored or not.

    Yields:
        A key and why its chunk cannot be used: a tier fails to read it, or it needs another key.
    """
    for key in keys:
        found = store.get(key, promote=False)
        if found.reason is not None and store.contains(key):
            tier = f"{found.tier} tier: " if found.tier else ""
            yield key, Reason(code_of(found.reason), f"{tier}{found.reason}")
