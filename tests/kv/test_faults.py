"""What goes wrong with disks, files and other processes is a miss or a failed put, never more."""

import os
import time

import pytest
import torch

from cacheblend_rag.kv import DiskTier, HostTier, StoredChunk, TieredKVStore, Usage
from cacheblend_rag.kv.stored_chunk import PutResult
from cacheblend_rag.kv.tiers import disk as disk_module

from .samples import chunk_files, encode, make_key, make_kv, rounded, same

KEY, OTHER = make_key(0), make_key(1)
DATA = encode(KEY, make_kv())


@pytest.fixture
def disk(tmp_path):
    return DiskTier(tmp_path)


@pytest.fixture
def store(disk):
    with TieredKVStore([disk]) as store:
        yield store


def overwrite(tmp_path, data):
    """Replace the one stored chunk's file, as a damaged disk or a stranger would."""
    (path,) = chunk_files(tmp_path)
    path.write_bytes(data)


def on_disk(tmp_path):
    """The usage that is there: that of the chunks' files."""
    sizes = [path.stat().st_size for path in chunk_files(tmp_path)]
    return Usage(len(sizes), sum(sizes))


def temporaries(tmp_path):
    return list(tmp_path.rglob("*.tmp"))


def test_quarantine_leaves_usage_right_and_does_not_grow_without_end(store, disk, tmp_path):
    for _ in range(disk_module.QUARANTINE_FILES + 3):
        store.put(KEY, make_kv())
        overwrite(tmp_path, b"x" * len(DATA))
        assert store.get(KEY).reason == "damaged"
    assert len(disk.quarantined()) == disk_module.QUARANTINE_FILES
    assert (disk.usage().entries, disk.usage().nbytes) == (0, 0)


def test_a_file_replaced_under_a_reader_is_read_anew(store, disk, tmp_path, monkeypatch):
    store.put(KEY, make_kv())
    real = os.open
    larger = make_kv(5, tokens=50)

    def replaced_first(path, *options):
        monkeypatch.undo()
        disk.put(KEY, StoredChunk(larger, time.time()))
        return real(path, *options)

    monkeypatch.setattr(os, "open", replaced_first)
    assert same(store.get(KEY).kv, larger)


# What a hand that may write to the folder can do


@pytest.mark.parametrize("tiers", ["host disk", "disk host"])
@pytest.mark.parametrize("precision", ["int4", "fp8", "native"])
def test_no_tier_keeps_what_is_no_number(tmp_path, tiers, precision):
    """An older chunk stays, and no tier is thought to fail."""
    opened = [
        HostTier(1 << 20, name=f"host {number}") if kind == "host" else DiskTier(tmp_path)
        for number, kind in enumerate(tiers.split())
    ]
    bad = make_kv(1)
    bad.values[-1, 0, -1, 0] = torch.inf
    with TieredKVStore(opened, precision=precision) as store:
        store.put(OTHER, make_kv())
        for key in (KEY, OTHER):
            put = store.put(key, bad)
            assert put == PutResult(False, is_finite=False)
            assert put.refusal == "its KV holds NaN or infinity, the model overflows"
        for tier in opened:
            assert not tier.contains(KEY)
            assert same(tier.get(OTHER).kv, rounded(make_kv(), precision))
            assert not tier.guard.writing.is_failing
            assert tier.stats()["errors"] == 0
    assert not temporaries(tmp_path)
    assert len(chunk_files(tmp_path)) == ("disk" in tiers)


def test_a_link_for_quarantine_is_not_written_through(store, disk, tmp_path):
    elsewhere = tmp_path.parent / f"{tmp_path.name}-elsewhere"
    elsewhere.mkdir()
    (tmp_path / "quarantine").symlink_to(elsewhere)
    store.put(KEY, make_kv())
    overwrite(tmp_path, b"x" * len(DATA))
    assert TieredKVStore([DiskTier(tmp_path)]).get(KEY).kv is None
    assert list(elsewhere.iterdir()) == []


def test_what_befalls_a_file_later_does_not_reach_what_was_read(disk, tmp_path):
    """A memory map of it would end this process where it is cut short, and pass on what changes."""
    whole = make_kv(tokens=2000)
    store = TieredKVStore([HostTier(None), disk])
    assert disk.put(KEY, StoredChunk(whole, time.time()))
    (path,) = chunk_files(tmp_path)
    read = store.get(KEY).kv
    with path.open("r+b") as file:
        file.seek(-4096, os.SEEK_END)
        file.write(b"\x01" * 4096)
        file.truncate(8192)
    assert same(read, whole)
    again = store.get(KEY)
    assert again.tier == "host"
    assert same(again.kv, whole)
    store.close()


def test_a_file_cut_short_while_it_is_read_is_damaged(store, tmp_path, monkeypatch):
    store.put(KEY, make_kv(tokens=2000))
    (path,) = chunk_files(tmp_path)
    real = torch.empty

    def cut_first(*size, **options):
        os.truncate(path, 8192)
        return real(*size, **options)

    monkeypatch.setattr(torch, "empty", cut_first)
    assert store.get(KEY).reason == "damaged"


def test_a_link_for_a_chunks_file_is_not_followed(store, tmp_path):
    store.put(KEY, make_kv())
    (path,) = chunk_files(tmp_path)
    other = tmp_path / "elsewhere"
    path.rename(other)
    path.symlink_to(other)
    assert store.get(KEY).reason == "store error"
    path.unlink()
    os.mkfifo(path)
    assert store.get(KEY).reason == "damaged"


def test_a_chunk_from_the_future_expires(disk, tmp_path):
    """Unless it is no further ahead than clocks lie apart."""
    store = TieredKVStore([disk], ttl_seconds=1e6)
    for ahead, found in ((100, True), (1e5, False)):
        disk.put(KEY, StoredChunk(make_kv(), time.time() + ahead))
        assert (store.get(KEY).kv is not None) == found
    store.close()
