"""Warming: the chunks that were used latest come into the fastest tier, as far as there is room."""

from __future__ import annotations

from pathlib import Path

import pytest

from cacheblend_rag.admin import inspect
from cacheblend_rag.admin.inspect import Choice, named
from cacheblend_rag.kv import DiskTier, TieredKVStore
from tests.kv.samples import chunk_files, make_key, make_kv

KEYS = [make_key(number) for number in range(5)]
ALL = Choice().condition(None)


@pytest.fixture
def slow(tmp_path: Path) -> DiskTier:
    """A tier with five chunks, used in the order of their numbers."""
    with TieredKVStore([DiskTier(tmp_path / "slow", name="slow")]) as store:
        for number, key in enumerate(KEYS):
            store.put(key, make_kv(number))
        return store.tiers[0]  # type: ignore[return-value]


def opened(slow: DiskTier, fast: Path, capacity: int | None = None) -> TieredKVStore:
    return TieredKVStore([DiskTier(fast, capacity, name="fast"), slow])


def held(store: TieredKVStore) -> set[object]:
    return {key for key, _ in store.tiers[0].entries()}


def test_chunks_come_in_the_order_given(slow: DiskTier, tmp_path: Path) -> None:
    store = opened(slow, tmp_path / "fast")
    order = [KEYS[3], KEYS[1], KEYS[0]]
    size = store.nbytes(KEYS[0]) or 0
    report = inspect.warm(store, order, 2 * size)
    assert (report["warmed"], report["left"], report["bytes"]) == (2, 1, 2 * size)
    assert held(store) == {KEYS[3], KEYS[1]}
    again = inspect.warm(store, order)
    assert (again["warmed"], again["there"], again["left"]) == (1, 2, 0)


def test_what_was_used_latest_comes_first(slow: DiskTier, tmp_path: Path) -> None:
    store = opened(slow, tmp_path / "fast")
    assert inspect.latest_used(store, ALL) == KEYS[::-1]
    assert inspect.latest_used(store, named([str(KEYS[2])])) == [KEYS[2]]


def test_no_more_is_brought_than_the_tier_holds(slow: DiskTier, tmp_path: Path) -> None:
    size = slow.entry(KEYS[0]).nbytes  # type: ignore[union-attr]
    store = opened(slow, tmp_path / "fast", 3 * size)
    report = inspect.warm(store, KEYS)
    assert (report["warmed"], report["left"]) == (3, 2)
    assert held(store) == set(KEYS[:3])  # none was driven out by a later one
    assert store.stats()["fast"]["evictions"] == 0


def test_what_is_gone_or_damaged_is_counted(slow: DiskTier, tmp_path: Path) -> None:
    damaged = next(p for p in chunk_files(slow.path) if p.name.startswith(str(KEYS[1])))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    report = inspect.warm(opened(slow, tmp_path / "fast"), [KEYS[1], make_key(77), KEYS[2]])
    assert (report["warmed"], report["missing"]) == (1, 2)
