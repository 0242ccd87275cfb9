"""Pins stored chunks, which no process evicts for capacity or age."""

from __future__ import annotations

from cacheblend_rag.admin.select import Condition
from cacheblend_rag.errors import StoreError
from cacheblend_rag.kv.store import TieredKVStore


def pin(store: TieredKVStore, condition: Condition) -> int:
    """Pin the stored chunks for which a condition holds; returns how many.

    Raises StoreError when no tier keeps pins.
    """
    _check_keeps(store)
    keys = [key for key, entry in store.entries().items() if condition(key, entry)]
    store.pin(*keys)
    return len(keys)


def unpin(store: TieredKVStore, condition: Condition | None = None) -> int:
    """Unpin the stored chunks for which a condition holds, or all, stored or not.

    Returns how many were pinned. Raises StoreError when no tier keeps pins.
    """
    _check_keeps(store)
    keys = store.pinned()
    if condition is not None:
        held = store.entries()
        keys = {key for key in keys & held.keys() if condition(key, held[key])}
    store.unpin(*keys)
    return len(keys)


def without_pins(store: TieredKVStore) -> list[str]:
    """Return the names of the tiers that keep no pins, where pinned chunks may be evicted."""
    return [tier.name for tier in store.tiers if not tier.keeps_pins]


def _check_keeps(store: TieredKVStore) -> None:
    if not any(tier.keeps_pins for tier in store.tiers):
        names = ", ".join(without_pins(store))
        raise StoreError(f"no pins are kept in {names}: only a folder (disk) keeps pins")
