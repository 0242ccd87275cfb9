"""Disks that fill up, turn read-only or lose files, killed writers, clocks that jump."""

import errno
import os
import time

import pytest

from cacheblend_rag.kv import DiskTier, HostTier, TieredKVStore
from cacheblend_rag.kv.tiers import disk, disk_index
from cacheblend_rag.kv.tiers.disk import INDEX

from .samples import chunk_files, encode, make_key, make_kv, same

KEYS = [make_key(number) for number in range(12)]
FILE = len(encode(KEYS[0], make_kv()))


@pytest.fixture
def store(tmp_path):
    with TieredKVStore([DiskTier(tmp_path)]) as store:
        for number, key in enumerate(KEYS[:4]):
            assert store.put(key, make_kv(number))
        yield store


def still_there(store, numbers=range(4)):
    return all(same(store.get(KEYS[number]).kv, make_kv(number)) for number in numbers)


def refusing(number, real, *, writes_only=False):
    """What an operation of ``os`` does on a disk that fails so."""

    def operation(*arguments, **options):
        if writes_only and not arguments[1] & (os.O_WRONLY | os.O_RDWR):
            return real(*arguments, **options)
        raise OSError(number, os.strerror(number))

    return operation


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC])
def test_a_disk_that_takes_no_writes_is_still_read(store, tmp_path, monkeypatch, number):
    damaged = chunk_files(tmp_path)[0]
    key = next(key for key in KEYS if str(key) in damaged.name)
    sound = [number for number in range(4) if KEYS[number] != key]
    damaged.write_bytes(b"rubbish")
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refusing(number, os.open, writes_only=True))
        for name in ("mkdir", "makedirs", "replace", "rename", "unlink", "utime"):
            patch.setattr(os, name, refusing(number, getattr(os, name)))
        assert not store.put(KEYS[5], make_kv(5))
        assert not store.put(KEYS[sound[0]], make_kv(9))
        deleted = sound.pop()
        assert not store.evict(KEYS[deleted])
        assert still_there(store, sound)
        assert store.get(key).reason == "damaged"
        assert store.contains_many(KEYS[:4]) == [number != deleted for number in range(4)]
        assert isinstance(store.stats()["disk"]["errors"], int)
    assert store.get(key).reason == "damaged", "set aside now"
    assert store.put(KEYS[5], make_kv(5)), "and back by itself"
    assert still_there(store, sound)
    assert DiskTier(tmp_path).usage().entries == len(chunk_files(tmp_path))


def test_a_store_opens_on_a_disk_without_room_and_reads_it(store, tmp_path, monkeypatch, caplog):
    (tmp_path / INDEX).unlink()
    connect = disk_index.connect

    def full(*arguments):
        """A file that may not grow."""
        file = connect(*arguments)
        file.execute("PRAGMA max_page_count = 1")
        return file

    with monkeypatch.context() as patch:
        patch.setattr(disk_index, "connect", full)
        again = TieredKVStore([DiskTier(tmp_path)])
        assert still_there(again)
        assert not again.put(KEYS[5], make_kv(5))
        assert "nothing new is stored: " in caplog.text
    assert again.put(KEYS[5], make_kv(5))
    assert again.tiers[0].usage().entries == 5
    again.close()


def test_what_a_killed_writer_left_is_removed_once_no_writer_that_young_may_be_alive(store):
    left = store.tiers[0].path / "00" / f"{KEYS[0]}.safetensors.1.tmp"
    left.parent.mkdir(exist_ok=True)
    for age in (0.0, disk.STALE_TEMPORARY_SECONDS + 1):
        left.write_bytes(b"half a chunk")
        os.utime(left, (time.time() - age,) * 2)
        assert len(store.keys()) == 4
        assert left.exists() == (age == 0)


@pytest.mark.parametrize("jump", [-7200, -1, 1e9])
def test_a_clock_that_jumps_costs_misses_at_most(tmp_path, clock, jump):
    tiers = [HostTier(3 * make_kv().nbytes), DiskTier(tmp_path, 6 * FILE)]
    with TieredKVStore(tiers) as store:
        for number, key in enumerate(KEYS[:6]):
            store.put(key, make_kv(number))
        clock.advance(jump)
        assert still_there(store, range(6))
        for tier in tiers:
            tier.ttl_seconds = 3600
        for number, key in enumerate(KEYS[:6]):
            found = store.get(key)
            gone = jump > 3600 or jump < -300
            assert found.reason == ("not stored" if gone else None)
            assert gone or same(found.kv, make_kv(number))
        clock.advance(-jump)
        for number, key in enumerate(KEYS[:6]):
            assert store.put(key, make_kv(number))
        assert still_there(store, range(6))
        assert store.stats()["disk"]["errors"] == 0
