"""What processes know of a folder's chunks: pins, uses and sizes; lost, damaged, forged, locked."""

import os
import sqlite3
import time
from contextlib import closing

import pytest

from cacheblend_rag.errors import StoreError
from cacheblend_rag.kv import DiskTier, StoredChunk, TieredKVStore, TierPolicy, Usage
from cacheblend_rag.kv.tiers import disk_index
from cacheblend_rag.kv.tiers.disk import INDEX

from .samples import chunk_files, make_key, make_kv, same, until

KEYS = [make_key(number) for number in range(6)]


@pytest.fixture
def folder(tmp_path):
    """Of a store with two chunks."""
    with TieredKVStore([DiskTier(tmp_path)]) as store:
        for number in (0, 1):
            store.put(KEYS[number], make_kv(number))
    return tmp_path


def room_for_two(folder):
    """A tier, as another process opens it, that has room for two chunks."""
    size = chunk_files(folder)[0].stat().st_size
    return DiskTier(folder, policy=TierPolicy(2 * size, admit="always"))


def stored(number=0):
    return StoredChunk(make_kv(number), time.time())


def held(folder):
    return {number for number, key in enumerate(KEYS) if DiskTier(folder).contains(key)}


def on_disk(folder):
    sizes = [path.stat().st_size for path in chunk_files(folder)]
    return Usage(len(sizes), sum(sizes))


def statements(folder, *statements):
    with closing(sqlite3.connect(folder / INDEX)) as file, file:
        for statement in statements:
            file.execute(statement)


# Pins


def test_pins_of_two_processes_add_up_and_are_bounded(folder, monkeypatch):
    one, other = DiskTier(folder), DiskTier(folder)
    one.pin(KEYS[0], KEYS[1])
    other.pin(KEYS[2])
    other.unpin(KEYS[1], KEYS[4])
    assert one.pinned() == other.pinned() == {KEYS[0], KEYS[2]}
    assert one.is_pinned(KEYS[2])
    assert not one.is_pinned(KEYS[1])
    monkeypatch.setattr(disk_index, "MOST_PINS", 2)
    with pytest.raises(StoreError, match=r"^3 chunks are more than the 2 that can be pinned$"):
        one.pin(KEYS[3])
    assert other.pinned() == {KEYS[0], KEYS[2]}


def test_an_index_that_cannot_be_read_unpins_nothing(folder, caplog, monkeypatch):
    monkeypatch.setattr(disk_index, "LOCK_SECONDS", 0.05)
    tier = DiskTier(folder)
    tier.pin(KEYS[0])
    assert tier.is_pinned(KEYS[0])
    with closing(sqlite3.connect(folder / INDEX, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        for _ in range(2):
            assert tier.pinned() == {KEYS[0]}
        assert caplog.text.count("pins stay as they were") == 1
        with pytest.raises(StoreError, match=r"cannot pin in .*database is locked"):
            tier.pin(KEYS[2])
        other.execute("ROLLBACK")
    tier.pin(KEYS[2])
    assert tier.pinned() == {KEYS[0], KEYS[2]}


# Uses


def test_uses_of_all_processes_count_and_outlive_them(folder, clock):
    clock.advance(10)
    with TieredKVStore([DiskTier(folder)]) as reader:
        assert reader.get(KEYS[0]).tier == "disk"
    clock.advance(10)
    with TieredKVStore([room_for_two(folder)]) as writer:
        assert writer.put(KEYS[2], make_kv(2))
    assert held(folder) == {0, 2}


# An index that is lost, damaged, forged or locked


DAMAGES = {
    "lost": lambda path: path.unlink(),
    "rubbish": lambda path: path.write_bytes(b"x" * 5000),
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: os.truncate(path, path.stat().st_size // 2),
    "altered": lambda path: path.write_bytes(path.read_bytes()[:4096] + b"\xff" * 4096),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_an_index_that_is_lost_or_damaged_is_made_anew_from_the_files(folder, damage, caplog):
    DiskTier(folder).pin(KEYS[1])
    open_before = DiskTier(folder)
    DAMAGES[damage](folder / INDEX)
    with TieredKVStore([DiskTier(folder)]) as store:
        assert store.tiers[0].usage() == on_disk(folder)
        assert same(store.get(KEYS[0]).kv, make_kv(0))
        assert store.put(KEYS[2], make_kv(2))
        assert store.evict(KEYS[1])
    said = "is made anew, its pins are lost" in caplog.text
    assert said == (damage not in ("lost", "empty"))
    assert DiskTier(folder).pinned() == set()
    assert until(lambda: open_before.put(KEYS[3], stored(3)), 5)
    assert DiskTier(folder).usage() == on_disk(folder)
    assert held(folder) == {0, 2, 3}


@pytest.mark.parametrize(
    "forged",
    [
        "CREATE TRIGGER t AFTER INSERT ON chunks BEGIN DELETE FROM chunks; END",
        "CREATE VIEW v AS SELECT * FROM chunks",
        "DROP TABLE pins",
        "UPDATE chunks SET used = 'yesterday'",
    ],
)
def test_no_foreign_trigger_or_view_is_run(folder, forged, caplog):
    statements(folder, "PRAGMA ignore_check_constraints = ON", forged)
    reader = DiskTier(folder, policy=TierPolicy(read_only=True))
    assert all(entry.used_at == entry.written_at for _, entry in reader.entries())
    tier = DiskTier(folder)
    assert "is made anew" in caplog.text
    assert tier.put(KEYS[2], stored(2))
    assert tier.usage() == on_disk(folder)


def test_what_is_no_key_is_passed_over_and_what_strangers_delete_is_forgotten(folder):
    statements(
        folder,
        "INSERT INTO pins VALUES ('../../etc/passwd'), ('')",
        f"INSERT INTO pins VALUES ('{KEYS[1]}')",  # noqa: S608
        "INSERT INTO chunks VALUES ('../../etc/passwd', 7, 0, 0, 0)",
    )
    tier = DiskTier(folder)
    assert tier.pinned() == {KEYS[1]}
    assert tier.usage() == on_disk(folder)
    chunk_files(folder)[0].unlink()
    assert len(list(tier.entries())) == 1
    tier.unpin(KEYS[1])
    assert len(tier.some_entries()) == 2
    assert len(tier.some_entries()) == 1
    assert tier.usage() == on_disk(folder)


@pytest.mark.parametrize("kind", ["link", "dangling link", "pipe", "folder"])
def test_what_stands_for_the_index_is_refused_by_name(tmp_path, kind):
    root, victim = tmp_path / "store", tmp_path / "victim"
    root.mkdir()
    victim.write_text("precious")
    if kind == "pipe":
        os.mkfifo(root / INDEX)
    elif kind == "folder":
        (root / INDEX).mkdir()
    else:
        (root / INDEX).symlink_to(victim if kind == "link" else tmp_path / "nowhere")
    with pytest.raises(StoreError, match=rf"{INDEX} is a {kind.split()[-1]} .*: remove it"):
        DiskTier(root)
    assert victim.read_text() == "precious"


def test_a_lock_that_stays_taken_fails_puts_but_not_reads(folder, monkeypatch):
    monkeypatch.setattr(disk_index, "LOCK_SECONDS", 0.05)
    disk = DiskTier(folder)
    with TieredKVStore([disk]) as store:
        with closing(sqlite3.connect(folder / INDEX, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            assert not store.put(KEYS[2], make_kv(2))
            assert not store.evict(KEYS[1])
            assert same(store.get(KEYS[0]).kv, make_kv(0))
            assert disk.stats()["errors"] == 2
            assert store.get(KEYS[1]).kv is None, "it is deleted once the lock is free"
            other.execute("ROLLBACK")
        assert list(folder.rglob("*.tmp")) == []
        assert until(lambda: store.put(KEYS[2], make_kv(2)))
