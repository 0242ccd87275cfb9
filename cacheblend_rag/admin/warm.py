"""Copies a store's most used chunks from slow tiers into fast ones, up to a limit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from cacheblend_rag.admin.select import Condition
from cacheblend_rag.errors import StoreError
from cacheblend_rag.kv import KVKey, TieredKVStore
from cacheblend_rag.kv.access_log import AccessLog


@dataclass(frozen=True)
class WarmReport:
    """Chunks and bytes in the fastest tier after a warm-up, and chunks that are not.

    warmed: copied by this run. there: in the tier before. missing: not stored, or not readable.
    left: without room in the tier.
    """

    warmed: int = 0
    nbytes: int = 0
    there: int = 0
    missing: int = 0
    left: int = 0


def most_used(store: TieredKVStore, condition: Condition, log: Path | None) -> list[KVKey]:
    """Return the keys of chunks, the most used first.

    log: an access log whose entries are counted; without one, the most recently used come first.
    Raises StoreError when there is no such log, or it is no regular file.
    """
    if log is not None:
        AccessLog(log).check()
    entries = {key: entry for key, entry in store.entries().items() if condition(key, entry)}
    if log is None:
        return sorted(entries, key=lambda key: entries[key].used_at, reverse=True)
    if not log.is_file():
        raise StoreError(
            f"{log} is not an access log: an engine writes one with `--store access_log=FILE`"
        )
    return [key for key in AccessLog(log).most_used() if key in entries]


def warm(
    store: TieredKVStore,
    keys: Iterable[KVKey],
    most_bytes: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> WarmReport:
    """Copy chunks into the fastest tier, in this order, until it or ``most_bytes`` is full.

    progress: called with the number of chunks done and the total.
    """
    todo = list(dict.fromkeys(keys))
    fastest = store.tiers[0]
    bounds = [bound for bound in (most_bytes, fastest.capacity_bytes) if bound is not None]
    room = min(bounds, default=None)
    warmed = there = missing = nbytes = 0
    for done, key in enumerate(todo):
        if progress is not None:
            progress(done + 1, len(todo))
        size = store.nbytes(key)
        if size is None:
            missing += 1
            continue
        if room is not None and nbytes + size > room:
            return WarmReport(warmed, nbytes, there, missing, len(todo) - done)
        nbytes += size
        if fastest.contains(key):
            there += 1
        elif store.promote(key):
            warmed += 1
        else:
            missing += 1
            nbytes -= size
    return WarmReport(warmed, nbytes, there, missing)
