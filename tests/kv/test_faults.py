"""What goes wrong with disks, files and other processes is a miss or a failed put, never more."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

from cacheblend_rag.kv import DiskTier, HostTier, StoredChunk, TieredKVStore, Usage
from cacheblend_rag.kv.stored_chunk import PutResult
from cacheblend_rag.kv.tiers import disk as disk_module

from .samples import chunk_files, encode, make_key, make_kv, rounded, same

KEY, OTHER = make_key(0), make_key(1)
DATA = encode(KEY, make_kv())
TESTS = Path(__file__).parents[1]


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


def run_python(code, *arguments):
    """Start a process that has this project, the samples and ``folder`` at hand."""
    prelude = """
        import os, resource, signal, sys, time
        from pathlib import Path
        from cacheblend_rag.kv import DiskTier, StoredChunk, TieredKVStore, codec
        from cacheblend_rag.kv.tiers import disk as disk_module
        from kv.samples import *
        folder = sys.argv[1]
    """
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(prelude) + textwrap.dedent(code), *arguments],
        env={**os.environ, "PYTHONPATH": f"{TESTS.parent}{os.pathsep}{TESTS}"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process, code=0):
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    return out


def test_a_lower_tier_answers_for_a_damaged_one(tmp_path):
    tiers = [DiskTier(tmp_path / name, name=name) for name in ("near", "far")]
    store = TieredKVStore(tiers)
    store.put(KEY, make_kv())
    overwrite(tmp_path / "near", b"rubbish")
    found = store.get(KEY)
    assert found.tier == "far"
    assert same(found.kv, make_kv())
    assert store.get(KEY).tier == "near"


def test_quarantine_leaves_usage_right_and_does_not_grow_without_end(store, disk, tmp_path):
    for _ in range(disk_module.QUARANTINE_FILES + 3):
        store.put(KEY, make_kv())
        overwrite(tmp_path, b"x" * len(DATA))
        assert store.get(KEY).reason == "damaged"
    assert len(disk.quarantined()) == disk_module.QUARANTINE_FILES
    assert (disk.usage().entries, disk.usage().nbytes) == (0, 0)


def test_a_file_evicted_under_a_reader_is_a_plain_miss(store, monkeypatch):
    store.put(KEY, make_kv())
    real = os.open

    def evicted_first(path, *options):
        os.unlink(path)
        return real(path, *options)

    monkeypatch.setattr(os, "open", evicted_first)
    assert store.get(KEY).reason == "not stored"


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


@pytest.mark.parametrize("moment", ["while writing", "before renaming"])
def test_a_killed_writer_leaves_nothing_but_a_file_that_is_cleaned_up(tmp_path, moment):
    process = run_python(
        """
        whole = disk_module.write_parts
        def half(file, parts):
            whole(file, parts)
            os.truncate(file.fileno(), file.tell() // 2)
            die()
        def die(*_):
            os.kill(os.getpid(), signal.SIGKILL)
        tier = DiskTier(folder)
        if sys.argv[2] == "while writing":
            disk_module.write_parts = half
        else:
            os.replace = die
        tier.put(make_key(0), StoredChunk(make_kv(), time.time()))
        """,
        str(tmp_path),
        moment,
    )
    finish(process, -signal.SIGKILL)
    (left,) = temporaries(tmp_path)
    tier = DiskTier(tmp_path, len(DATA))
    assert not tier.contains(KEY)
    assert list(tier.entries()) == []
    assert tier.usage().entries == 0
    assert left.exists(), "a writer this young may be alive"
    old = time.time() - disk_module.STALE_TEMPORARY_SECONDS - 1
    os.utime(left, (old, old))
    assert tier.put(KEY, StoredChunk(make_kv(), time.time()))
    DiskTier(tmp_path)
    assert not left.exists()
    assert same(tier.get(KEY).kv, make_kv())


# What a hand that may write to the folder can do


@pytest.mark.parametrize("tiers", ["host disk", "disk host"])
@pytest.mark.parametrize("precision", ["fp8", "native"])
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
            assert store.put(key, bad) == PutResult(False, is_finite=False)
        for tier in opened:
            assert not tier.contains(KEY)
            assert same(tier.get(OTHER).kv, rounded(make_kv(), precision))
            assert not tier.guard.writing.is_failing
            assert tier.stats()["errors"] == 0
    assert not temporaries(tmp_path)
    assert len(chunk_files(tmp_path)) == ("disk" in tiers)


def test_what_a_model_computed_without_numbers_is_refused_by_name():
    bad = make_kv()
    bad.values[0] = torch.inf
    with TieredKVStore([HostTier(None)]) as store:
        put = store.put(KEY, bad)
        assert not put
        assert put.refusal == "its KV holds NaN or infinity, the model overflows"
        assert put.failure == "", "another call would not store it either"
        assert not store.contains(KEY)
        assert store.put(KEY, make_kv())


def test_a_link_for_quarantine_is_not_written_through(store, disk, tmp_path):
    elsewhere = tmp_path.parent / f"{tmp_path.name}-elsewhere"
    elsewhere.mkdir()
    (tmp_path / "quarantine").symlink_to(elsewhere)
    store.put(KEY, make_kv())
    overwrite(tmp_path, b"x" * len(DATA))
    assert TieredKVStore([DiskTier(tmp_path)]).get(KEY).kv is None
    assert list(elsewhere.iterdir()) == []


def test_a_chunk_written_long_ago_is_promoted_into_a_full_tier(tmp_path):
    """Its file is not taken for one that a killed writer left."""
    tier = DiskTier(tmp_path, len(DATA))
    assert tier.put(OTHER, StoredChunk(make_kv(1), time.time()))
    long_ago = time.time() - 2 * disk_module.STALE_TEMPORARY_SECONDS
    assert tier.put(KEY, StoredChunk(make_kv(), long_ago))
    assert tier.entry(KEY).written_at == pytest.approx(long_ago, abs=1)


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
