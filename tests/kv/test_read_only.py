"""Serving from what others store: nothing outside of memory changes, whatever happens."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from cacheblend_rag.kv import TieredKVStore

from .samples import chunk_files, make_key, make_kv

KEYS = [make_key(number) for number in range(4)]
LONG_AGO = 10_000.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A store of four chunks, one of them damaged, and what a killed writer left."""
    with TieredKVStore.open(kv_path=tmp_path) as writer:
        for number, key in enumerate(KEYS):
            assert writer.put(key, make_kv(number))
    damaged = next(path for path in chunk_files(tmp_path) if str(KEYS[3]) in path.name)
    damaged.write_bytes(damaged.read_bytes()[:-9])
    left = damaged.with_suffix(".safetensors.0.tmp")
    left.write_bytes(b"half")
    for path in (left, *chunk_files(tmp_path)):
        os.utime(path, (time.time() - LONG_AGO,) * 2)
    return tmp_path


def seen(folder: Path) -> dict[str, tuple[int, int, bytes]]:
    """Names, times of change and bytes of all files."""
    return {
        str(path.relative_to(folder)): (
            path.stat().st_mtime_ns,
            path.stat().st_size,
            path.read_bytes(),
        )
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_what_is_past_its_time_is_not_served_and_not_removed(folder: Path) -> None:
    before = seen(folder)
    with TieredKVStore.open(kv_path=folder, read_only=True, ttl_seconds=LONG_AGO / 2) as store:
        assert store.contains_many(KEYS) == [False] * 4
        assert [found.reason for found in store.get_many(KEYS)] == ["not stored"] * 4
    assert seen(folder) == before
