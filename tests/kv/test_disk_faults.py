"""Disks that fill up, turn read-only or lose files, killed writers, clocks that jump, crowds."""

import errno
import os
import random
import signal
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest
import torch

from cacheblend_rag.kv import DiskTier, HostTier, TieredKVStore, TierPolicy
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


TOUCHES = {"open", "os.rename", "os.remove", "os.utime", "os.mkdir", "os.scandir"}
WANTED = [make_kv(number, tokens=50 + 400 * (number % 3)) for number in range(10)]
ROOM = 3 * max(len(encode(KEYS[number], kv)) for number, kv in enumerate(WANTED))


def write_until_killed(folder, seed, left):
    """Put and evict chunks; left: how often the disk may be touched before the end."""
    draw = random.Random(seed)

    def count(event, _):
        nonlocal left
        left -= event in TOUCHES
        if event in TOUCHES and left <= 0:
            os.kill(os.getpid(), signal.SIGKILL)

    if left is not None:
        sys.addaudithook(count)
    policy = TierPolicy(ROOM, admit="always")
    with TieredKVStore([HostTier(0), DiskTier(folder, policy=policy)]) as store:
        while True:
            number = draw.randrange(len(WANTED))
            if draw.random() < 0.2:
                store.evict(KEYS[number])
            else:
                store.put(KEYS[number], WANTED[number])


def kill_a_hundred(folder):
    """Half are killed at the n-th thing they do to the disk, half at random.

    Return how many chunks were found after them, and how many at most.
    """
    torch.set_num_threads(1)
    draw, found, most = random.Random(0), 0, 0
    for child in range(100):
        if not (pid := os.fork()):
            write_until_killed(folder, child, None if child % 2 else 3 + 2 * child)
        if child % 2:
            time.sleep(draw.uniform(0, 0.05))
            os.kill(pid, signal.SIGKILL)
        assert os.WIFSIGNALED(os.waitpid(pid, 0)[1])
        tier = DiskTier(folder, ROOM)
        for key, kv in zip(KEYS, WANTED, strict=False):
            read = tier.get(key)
            assert read is None or same(read.kv, kv)
            found += read is not None
        stats = tier.stats()
        assert stats["errors"] == stats["quarantined"] == 0, stats
        sizes = [path.stat().st_size for path in chunk_files(folder)]
        assert sum(sizes) <= ROOM
        most = max(most, len(sizes))
    return found, most


def test_a_process_killed_at_any_write_leaves_every_chunk_right_or_absent(tmp_path):
    """And files that are cleaned up once no writer that young may be alive."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        found, most = pool.submit(kill_a_hundred, tmp_path).result(120)
    assert found > 10
    assert most > 1
    left, old = [*tmp_path.rglob("*.tmp")], time.time() - disk.STALE_TEMPORARY_SECONDS - 1
    assert left
    for path in left:
        os.utime(path, (old, old))
    with TieredKVStore([DiskTier(tmp_path)]) as store:
        assert store.verify().damaged == ()
        assert store.put(KEYS[0], make_kv())
    assert not [*tmp_path.rglob("*.tmp")]


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
