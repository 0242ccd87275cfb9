"""Reads all stored objects, and finds the damaged ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cacheblend_rag.kv.chunk_kv import KVKey
from cacheblend_rag.kv.key_locks import KeyLocks
from cacheblend_rag.kv.tiers import Tier


@dataclass(frozen=True, slots=True)
class DamagedObject:
    """One stored object that failed its check."""

    tier: str
    key: KVKey
    reason: str


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The result of verify. checked: objects read. expired: removed as expired."""

    checked: int
    expired: int
    damaged: tuple[DamagedObject, ...]


def read_through(
    tiers: Sequence[Tier],
    locks: KeyLocks,
    *,
    repair: bool,
    progress: Callable[[int, int], None] | None,
) -> tuple[int, tuple[DamagedObject, ...]]:
    """Read every object of the durable tiers; returns how many there were, and the damaged ones.

    locks: held, one key at a time. repair: whether damaged objects are quarantined. progress:
    called with the number of objects done and the total.
    """
    todo = [(tier, key) for tier in tiers if tier.durable for key, _ in tier.all_entries()]
    damaged = []
    for done, (tier, key) in enumerate(todo, start=1):
        with locks.held(key):
            reason = tier.check(key)
            if reason is not None and repair:
                tier.quarantine(key, reason)
        if reason is not None:
            damaged.append(DamagedObject(tier.name, key, reason))
        if progress is not None:
            progress(done, len(todo))
    return len(todo), tuple(damaged)
