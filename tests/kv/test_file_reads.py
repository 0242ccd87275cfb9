"""The disk tier's reads past the page cache: the same bytes, and the cache is left as it was."""

from __future__ import annotations

import errno
import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cacheblend_rag.errors import DamagedChunkError
from cacheblend_rag.kv import ChunkKV, DiskTier, HostTier, TieredKVStore
from cacheblend_rag.kv.read_memory import OF_PROCESS, ReadMemory
from cacheblend_rag.kv.stored_chunk import StoredChunk
from cacheblend_rag.kv.tiers import file_reads
from cacheblend_rag.kv.tiers.file_reads import LEAST_BYTES, cached_share, read_range
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

    if not hasattr(os, "posix_fadvise") or not hasattr(os, "O_DIRECT"):
        pytest.skip("this system does not read past its page cache")
    probe = tmp_path / "probe"
    probe.write_bytes(b"x")
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
        return read_range(file, start, end - start, direct=direct).numpy().tobytes()


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
    monkeypatch.setattr(os, "preadv", lambda *_: pytest.fail("read directly"))
    assert read(path, 0, SIZE) == contents


def test_without_direct_reads_are_cached(drop: Drop, path: Path, contents: bytes) -> None:
    drop(path)
    assert read(path, 0, SIZE, direct=False) == contents
    assert share_of(path) == 1


def test_a_small_read_caches_no_more_than_itself(drop: Drop, path: Path, contents: bytes) -> None:
    drop(path)
    assert read(path, 0, PAGE) == contents[:PAGE]
    assert share_of(path) <= 16 * PAGE / SIZE


@pytest.mark.parametrize("refused", ["the flag", "the read", "no buffer"])
def test_where_it_is_impossible_reading_goes_on_as_usual(
    drop: Drop, path: Path, contents: bytes, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.EINVAL, "not here")

    drop(path)
    if refused == "the flag":
        own = file_reads.fcntl.fcntl
        monkeypatch.setattr(
            file_reads.fcntl, "fcntl", lambda *told: refuse() if told[-1] else own(*told)
        )
    elif refused == "the read":
        monkeypatch.setattr(os, "preadv", refuse)
    else:
        monkeypatch.setattr(file_reads, "read_buffer", lambda *_: None)
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


def test_a_gpu_gets_no_numbers_at_addresses_that_it_reads_slowly(
    drop: Drop, path: Path, contents: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked = Locked()
    monkeypatch.setattr(OF_PROCESS, "locked", ReadMemory(locked.memory))
    for start, directly in ((64, True), (68, False)):
        drop(path)
        with path.open("rb", buffering=0) as file:
            found = read_range(file, start, SIZE - start, direct=True)
        assert found.numpy().tobytes() == contents[start:]
        assert locked.has(found)
        assert found.data_ptr() % 16 == 0
        assert (share_of(path) == 0) == directly


# In a store


@pytest.mark.parametrize(
    ("tiers", "direct"),
    [
        ("host://,disk://{}", True),
        ("disk://{}", False),
        ("disk://{}?direct=yes", True),
        ("host://,disk://{}?direct=no", False),
        ("host://?promote=no,disk://{}", False),
        ("host://?capacity=0,disk://{}", False),
    ],
)
def test_behind_a_tier_in_memory_a_disk_is_read_directly(
    tmp_path: Path, tiers: str, direct: bool
) -> None:
    found = open_tiers(StoreConfig(tiers=tiers.format(tmp_path)), "cpu")
    assert found[-1]._direct == direct


@pytest.mark.parametrize(("host_bytes", "direct"), [(1 << 20, True), (0, False)])
def test_so_is_the_folder_of_a_store(tmp_path: Path, host_bytes: int, direct: bool) -> None:
    found = open_tiers(StoreConfig(kv_path=tmp_path, host_bytes=host_bytes), "cpu")
    assert found[-1]._direct == direct


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
    memory = type(OF_PROCESS)().pageable
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


def test_a_forked_process_has_buffers_of_its_own() -> None:
    with OF_PROCESS.pageable._mutex:  # as if another thread held it
        child = os.fork()
        if not child:
            found = OF_PROCESS.pageable.room(1 << 20)
            os._exit(0 if found is not None else 1)
    assert os.waitpid(child, 0)[1] == 0
