"""The disk tier's reads past the page cache: the same bytes, and the cache is left as it was."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cacheblend_rag.errors import DamagedChunkError
from cacheblend_rag.kv import ChunkKV, DiskTier, HostTier, TieredKVStore, layer_wait, read_memory
from cacheblend_rag.kv.pages import LimitedPages
from cacheblend_rag.kv.read_memory import OF_PROCESS, ReadMemory
from cacheblend_rag.kv.stored_chunk import StoredChunk
from cacheblend_rag.kv.tiers import file_reads
from cacheblend_rag.kv.tiers.file_reads import (
    LEAST_BYTES,
    WINDOW_BYTES,
    DirectReads,
    cached_share,
    read_range,
)
from cacheblend_rag.kv.tiers.urls import open_tiers
from cacheblend_rag.settings import StoreConfig
from tests.kv.locked import PAGE, Locked
from tests.kv.samples import make_key
from tests.kv.test_read_memory import large_kv

SIZE = 3 * LEAST_BYTES + 1234
Drop = Callable[[Path], None]


@pytest.fixture(scope="module")
def contents() -> bytes:
    return torch.randint(256, (SIZE,), dtype=torch.uint8).numpy().tobytes()


@pytest.fixture
def drop(tmp_path: Path) -> Drop:
    """Drops files from the page cache."""

    def dropped(path: Path) -> None:
        with path.open("rb+") as file:
            os.fsync(file)
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    if sys.platform != "linux":
        pytest.skip("other systems do not read past their page cache")
    probe = tmp_path / "probe"
    probe.write_bytes(b"x")
    assert share_of(probe) == 1
    dropped(probe)
    if share_of(probe):
        pytest.skip("the test's folder is in memory")
    return dropped


@pytest.fixture
def path(tmp_path: Path, contents: bytes) -> Path:
    path = tmp_path / "chunk"
    path.write_bytes(contents)
    return path


def share_of(path: Path) -> float:
    with path.open("rb") as file:
        return cached_share(file.fileno(), 0, path.stat().st_size)


def read(path: Path, start: int, end: int, *, direct: bool = True) -> bytes:
    with path.open("rb", buffering=0) as file:
        return read_range(file, start, end - start, DirectReads(direct)).numpy().tobytes()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(start=st.integers(0, SIZE - LEAST_BYTES), length=st.integers(LEAST_BYTES, SIZE))
def test_any_range_is_the_same_and_not_cached(
    drop: Drop, path: Path, contents: bytes, start: int, length: int
) -> None:
    drop(path)
    end = min(start + length, SIZE)
    assert read(path, start, end) == contents[start:end]
    assert share_of(path) == 0


def test_what_is_in_the_page_cache_is_read_from_there(
    drop: Drop, path: Path, contents: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    drop(path)
    path.read_bytes()
    assert share_of(path) == 1
    plain = os.preadv

    def buffered(file: int, *told: Any) -> int:
        assert not fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT
        return plain(file, *told)

    monkeypatch.setattr(os, "preadv", buffered)
    assert read(path, 0, SIZE) == contents


def test_without_direct_reads_are_cached(drop: Drop, path: Path, contents: bytes) -> None:
    drop(path)
    assert read(path, 0, SIZE, direct=False) == contents
    assert share_of(path) == 1


def test_a_small_read_caches_no_more_than_itself(drop: Drop, path: Path, contents: bytes) -> None:
    drop(path)
    assert read(path, 0, PAGE) == contents[:PAGE]
    assert share_of(path) <= 16 * PAGE / SIZE


@pytest.mark.parametrize("code", ["EINVAL", "EOPNOTSUPP", "ENOSYS", "EIO"])
@pytest.mark.parametrize("refused", ["the flag", "the read"])
def test_where_it_is_impossible_reading_goes_on_as_usual(
    drop: Drop,
    path: Path,
    contents: bytes,
    monkeypatch: pytest.MonkeyPatch,
    refused: str,
    code: str,
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(getattr(errno, code), "not here")

    drop(path)
    if refused == "the flag":
        own = fcntl.fcntl
        monkeypatch.setattr(fcntl, "fcntl", lambda *told: refuse() if told[-1] else own(*told))
    else:
        plain = os.preadv

        def refused_direct(file: int, *told: Any) -> int:
            if fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT:
                refuse()
            return plain(file, *told)

        monkeypatch.setattr(os, "preadv", refused_direct)
    assert read(path, 100, SIZE) == contents[100:]
    assert share_of(path) > 0.9


@pytest.mark.parametrize("why", ["no buffer", "a fork"])
def test_so_it_does_without_a_buffer_and_after_a_fork(
    drop: Drop, path: Path, contents: bytes, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    drop(path)
    own = os.preadv

    def forking(*told: Any) -> int:
        child = os.fork()
        if not child:
            os._exit(0)
        os.waitpid(child, 0)
        return own(*told)

    if why == "no buffer":
        monkeypatch.setattr(file_reads, "read_buffer", lambda *_: None)
    else:
        monkeypatch.setattr(os, "preadv", forking)
    assert read(path, 100, SIZE) == contents[100:]
    assert share_of(path) > 0.9


def test_a_disk_that_fails_is_an_error(
    drop: Drop, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(errno.EIO, "no such sector")

    drop(path)
    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(OSError, match="no such sector"):
        read(path, 0, SIZE)


def test_a_file_that_is_shorter_is_damaged(drop: Drop, path: Path) -> None:
    drop(path)
    with pytest.raises(DamagedChunkError, match="cut short"):
        read(path, LEAST_BYTES, SIZE + 1)


def test_asking_brings_no_page_in_and_any_page_counts(path: Path) -> None:
    """Where files stay in memory, as on a tmpfs, that is told as often."""
    with path.open("rb+") as file:
        os.fsync(file)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        told = [cached_share(file.fileno(), 0, SIZE) for _ in range(3)]
        assert len(set(told)) == 1
        file.seek(SIZE - 1)
        file.read(1)
        assert cached_share(file.fileno(), 0, SIZE) > 0


def test_older_systems_tell_the_same(drop: Drop, path: Path) -> None:
    drop(path)
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        file.seek(8 * PAGE)
        file.read(8 * PAGE)
        told = cached_share(file.fileno(), 0, 32 * PAGE)
        older = file_reads._mapped_share(file.fileno(), 0, 32 * PAGE, 32)
    assert told == older
    assert 0.25 <= told < 1


def test_where_cached_pages_are_not_counted_the_map_tells(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on an overlay, which keeps pages with the file below: no count is no proof."""

    class Libc:
        def syscall(self, *_: Any) -> int:
            return 0

        def __getattr__(self, name: str) -> Any:
            return getattr(libc, name)

    libc = file_reads._libc()
    monkeypatch.setattr(file_reads, "_libc", Libc)
    monkeypatch.setattr(file_reads, "_COUNTED", set())
    path.read_bytes()
    assert share_of(path) == 1


# When it is worth it


def timed(direct: DirectReads, monkeypatch: pytest.MonkeyPatch, rate: float) -> None:
    """Read two windows, several reads at once, at so many bytes per second."""
    now = 0.0
    monkeypatch.setattr(layer_wait.time, "perf_counter", lambda: now)
    for _ in range(2):
        with direct.timed(WINDOW_BYTES // 2), direct.timed(WINDOW_BYTES // 2):
            now += WINDOW_BYTES / rate
        now += 1000  # nobody reads


@pytest.mark.parametrize("rate", [0.9, 1.1])
@pytest.mark.parametrize("wanted", [None, True, False])
def test_a_slow_disk_is_read_through_the_page_cache_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, wanted: bool | None, rate: float
) -> None:
    direct = DirectReads(wanted)
    assert direct.is_on == (wanted is not False)
    timed(direct, monkeypatch, rate * file_reads.LEAST_RATE)
    assert direct.is_on == (wanted is True or (wanted is None and rate > 1))


def test_a_few_slow_reads_prove_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    direct, now = DirectReads(None), iter((0.0, 9.0))
    monkeypatch.setattr(layer_wait.time, "perf_counter", lambda: next(now))
    with direct.timed(1 << 20):
        pass
    assert direct.is_on


def test_a_gpu_gets_no_numbers_at_addresses_that_it_reads_slowly(
    drop: Drop, path: Path, contents: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked = Locked()
    monkeypatch.setattr(OF_PROCESS, "locked", ReadMemory(locked.memory))
    for start, directly in ((64, True), (68, False)):
        drop(path)
        with path.open("rb", buffering=0) as file:
            found = read_range(file, start, SIZE - start, DirectReads(True))
        assert found.numpy().tobytes() == contents[start:]
        assert locked.has(found)
        assert found.data_ptr() % 16 == 0
        assert (share_of(path) == 0) == directly


# In a store


@pytest.mark.parametrize(
    ("tiers", "direct"),
    [
        ("host://,disk://{}", None),
        ("disk://{}", False),
        ("disk://{}?direct=yes", True),
        ("host://,disk://{}?direct=no", False),
        ("host://?promote=no,disk://{}", False),
        ("host://?capacity=0,disk://{}", False),
    ],
)
def test_behind_a_tier_in_memory_a_fast_disk_is_read_directly(
    tmp_path: Path, tiers: str, direct: bool | None
) -> None:
    found = open_tiers(StoreConfig(tiers=tiers.format(tmp_path)), "cpu")
    assert found[-1].direct.wanted is direct


@pytest.mark.parametrize(("host_bytes", "direct"), [(1 << 20, None), (0, False)])
def test_so_is_the_folder_of_a_store(tmp_path: Path, host_bytes: int, direct: bool | None) -> None:
    found = open_tiers(StoreConfig(kv_path=tmp_path, host_bytes=host_bytes), "cpu")
    assert found[-1].direct.wanted is direct


@pytest.mark.parametrize("tokens", [8191, 8192])
def test_a_chunk_is_the_same_and_stays_out_of_the_page_cache(
    drop: Drop, tmp_path: Path, tokens: int
) -> None:
    """With a prior of any length before the layers, so that these begin anywhere."""
    large = large_kv()
    kv = ChunkKV(large.keys[..., :tokens, :], large.values[..., :tokens, :], 0, torch.ones(tokens))
    tier = DiskTier(tmp_path / "store", direct=True)
    assert tier.put(make_key(0), StoredChunk(kv, 0.0))
    (file,) = (tmp_path / "store").rglob("*.safetensors")
    drop(file)
    reader = tier.open(make_key(0))
    for layer, (keys, values) in enumerate(reader.read(0, 6)):
        assert torch.equal(keys, kv.keys[layer])
        assert torch.equal(values, kv.values[layer])
    assert share_of(file) < 0.1, "only the head is read through it"


def test_reads_reuse_their_memory_and_chunks_that_stay_are_copied_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = read_memory._pageable()
    monkeypatch.setattr(OF_PROCESS, "pageable", memory)
    tiers = [HostTier(None), DiskTier(tmp_path)]
    for index in range(3):
        tiers[1].put(make_key(index), StoredChunk(large_kv(index), 0.0))
    with TieredKVStore(tiers) as store:
        for index in range(3):
            assert store.get(make_key(index)) is not None
        gc.collect()
        one = large_kv().nbytes
        assert one <= memory._memory.nbytes < 2 * one
        for index in range(3):
            assert torch.equal(tiers[0].get(make_key(index)).kv.keys, large_kv(index).keys)
    assert one <= memory.release() < 2 * one
    assert memory._memory.nbytes == 0


@pytest.mark.parametrize("kind", ["locked", "pageable"])
def test_a_forked_process_has_buffers_of_its_own(kind: str) -> None:
    with getattr(OF_PROCESS, kind)._mutex:  # as if another thread held it
        child = os.fork()
        if not child:
            signal.alarm(10)
            found = OF_PROCESS.pageable.room(1 << 20)
            read_memory.release_read_buffers()
            os._exit(0 if found is not None else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_buffers_are_not_freed_for_what_does_not_fit_anyway() -> None:
    memory = ReadMemory(LimitedPages(32 << 20))
    kept, free = memory.room(12 << 20), memory.room(12 << 20)
    assert kept is not None
    del free
    assert memory.room(30 << 20) is None
    assert memory._memory.nbytes > 24 << 20
    assert memory.room(18 << 20) is not None
