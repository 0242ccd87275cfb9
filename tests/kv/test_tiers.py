"""Every tier through the same cases: a new tier is one more line in TIERS."""

import os
import time
import uuid

import pytest
import torch

from cacheblend_rag.errors import DamagedChunkError, StoreError
from cacheblend_rag.kv import (
    DiskTier,
    HostTier,
    KVKey,
    ObjectTier,
    RedisTier,
    StoredChunk,
    chunk_id,
    fingerprint,
)
from cacheblend_rag.kv.tiers import files
from cacheblend_rag.kv.tiers.bytes import SUFFIX
from cacheblend_rag.kv.tiers.object_client import open_store
from tests.local_servers import BUCKET

from .samples import encode, make_key, make_kv, same

TIERS = {
    "host": lambda place, capacity: HostTier(capacity),
    "disk": lambda place, capacity: DiskTier(place.folder, capacity),
    "redis": lambda place, _: RedisTier(port=place.server("redis").port, prefix=place.name),
    "s3": lambda place, _: ObjectTier(
        open_store(f"s3://{BUCKET}/{place.name}", endpoint=place.server("s3").address)
    ),
    "file": lambda place, _: ObjectTier(open_store(place.folder.as_uri()), keeps_metadata=False),
}
BOUNDED = ["host", "disk"]
KEYS = [make_key(number) for number in range(6)]


class Place:
    """Where all tiers of one test keep their chunks, and nobody else's."""

    def __init__(self, folder, server):
        self.folder, self.server = folder, server
        self.name = f"{uuid.uuid4().hex}:"


@pytest.fixture(params=TIERS)
def make_tier(request, tmp_path):
    place = Place(tmp_path, request.getfixturevalue)
    return lambda capacity=None: TIERS[request.param](place, capacity)


@pytest.fixture(params=BOUNDED)
def make_bounded(request, tmp_path):
    return lambda capacity=None: TIERS[request.param](Place(tmp_path, None), capacity)


def stored(number=0, **options):
    return StoredChunk(make_kv(number, **options), time.time())


def size_in(tier):
    """Bytes one chunk of these tests takes in a tier."""
    kv = make_kv()
    return kv.nbytes if isinstance(tier, HostTier) else len(encode(KEYS[0], kv))


def fill(make_bounded, chunks, *, extra=0):
    """A tier with room for so many chunks and ``extra`` bytes, filled with as many."""
    tier = make_bounded(chunks * size_in(make_bounded()) + extra)
    for number in range(chunks):
        assert tier.put(KEYS[number], stored(number))
    return tier


def held(tier):
    return sorted(KEYS.index(key) for key, _ in tier.entries())


def test_a_chunk_comes_back_as_it_was(make_tier):
    tier = make_tier()
    for number, dtype in enumerate([torch.float32, torch.float16, torch.bfloat16]):
        chunk = stored(number, dtype=dtype, prior=number != 1)
        assert tier.put(KEYS[number], chunk)
        found = tier.get(KEYS[number])
        assert same(found.kv, chunk.kv)
        assert found.written_at == pytest.approx(chunk.written_at, abs=1)


def test_many_at_once_are_as_one_by_one(make_tier, monkeypatch):
    tier = make_tier()
    for number in (0, 1, 2, 3):
        tier.put(KEYS[number], stored(number))
    load, wrong = tier._open, {KEYS[1]: OSError("unplugged"), KEYS[2]: DamagedChunkError("bits")}

    def broken(key):
        if key in wrong:
            raise wrong[key]
        return load(key)

    monkeypatch.setattr(tier, "_open", broken)
    monkeypatch.setattr(tier.guard, "fails_whole", False)  # or the others would not be asked
    assert tier.entry_many(KEYS) == [tier.entry(key) for key in KEYS]
    found = tier.get_many(KEYS)
    assert same(found[0].kv, make_kv(0))
    assert same(found[3].kv, make_kv(3))
    assert [type(read) for read in found[1:3]] == [StoreError, DamagedChunkError]
    assert "unplugged" in str(found[1])
    assert found[4:] == [None, None]
    stats = tier.stats()
    counted = [stats[name] for name in ("hits", "misses", "errors", "quarantined", "entries")]
    assert counted == [2, 4, 1, 1, 3]
    assert (tier.get_many([]), tier.entry_many([])) == ([], [])


def test_putting_again_replaces(make_tier):
    tier = make_tier()
    tier.put(KEYS[0], stored(0))
    tier.put(KEYS[0], stored(9, tokens=7))
    assert same(tier.get(KEYS[0]).kv, make_kv(9, tokens=7))
    usage = tier.usage()
    assert usage.entries == 1
    assert usage.nbytes == tier.entry(KEYS[0]).nbytes


def test_the_least_recently_used_goes_first(make_bounded):
    tier = fill(make_bounded, 3)
    tier.get(KEYS[0])
    assert tier.put(KEYS[3], stored(3))
    assert held(tier) == [0, 2, 3]
    assert tier.put(KEYS[4], stored(4))
    assert held(tier) == [0, 3, 4]
    assert tier.stats()["evictions"] == 2


def test_capacity_is_never_passed(make_bounded):
    tier = fill(make_bounded, 2, extra=size_in(make_bounded()) // 2)
    for number in (2, 3, 4, 5, 1, 2, 2):
        assert tier.put(KEYS[number], stored(number))
        assert tier.usage().nbytes <= tier.capacity_bytes
        assert sum(entry.nbytes for _, entry in tier.entries()) == tier.usage().nbytes
    assert held(tier) == [1, 2]


def test_pinned_chunks_stay(make_bounded):
    tier = fill(make_bounded, 3)
    tier.pin(KEYS[0])
    for number in (3, 4, 5):
        assert tier.put(KEYS[number], stored(number))
    assert held(tier) == [0, 4, 5]
    tier.unpin(KEYS[0])
    assert tier.put(KEYS[1], stored(1))
    assert held(tier) == [1, 4, 5]


def test_a_tier_full_of_pins_refuses_and_loses_nothing(make_bounded):
    tier = fill(make_bounded, 3)
    for number in (0, 1):
        tier.pin(KEYS[number])
    assert not tier.put(KEYS[3], stored(3, tokens=8))
    assert held(tier) == [0, 1, 2]
    assert tier.stats()["refused"] == 1


@pytest.mark.parametrize(("most", "parts"), [(1, 2), (100, 1024), (1 << 20, 1)])
def test_disk_writes_on_behind_what_a_call_has_written(tmp_path, monkeypatch, most, parts):
    """As where a disk is nearly full, or a chunk has more parts than a call takes."""

    def some(descriptor, wanted):
        assert len(wanted) <= parts
        return os.write(descriptor, b"".join(wanted)[:most])

    monkeypatch.setattr(files, "PARTS_A_WRITE", parts)
    monkeypatch.setattr(os, "writev", some)
    assert DiskTier(tmp_path).put(KEYS[0], stored())
    (path,) = tmp_path.rglob(f"*{SUFFIX}")
    assert path.read_bytes() == encode(KEYS[0], stored().kv)


def test_disk_does_not_take_strangers_for_chunks(tmp_path):
    tier = DiskTier(tmp_path)
    tier.put(KEYS[0], stored())
    folder = next(tmp_path.glob("??"))
    (folder / "notes.txt").write_text("mine")
    (folder / "x.safetensors").write_text("mine")
    assert held(DiskTier(tmp_path)) == [0]
    assert (folder / "notes.txt").exists()


def test_a_relative_is_the_same_chunk_of_another_model_in_the_same_namespace(make_tier):
    tier = make_tier()
    chunk = chunk_id([1, 2, 3])
    ours = KVKey(chunk, fingerprint({"model": 1}, "ours"))
    tier.put(ours, StoredChunk(make_kv(), 1.0))
    can_tell = isinstance(tier, HostTier | DiskTier)  # the others would have to list
    assert tier.has_relative(KVKey(chunk, fingerprint({"model": 2}, "ours"))) == can_tell
    assert not tier.has_relative(ours)
    assert not tier.has_relative(KVKey(chunk, fingerprint({"model": 2}, "theirs")))
    assert not tier.has_relative(KVKey(chunk_id([9]), fingerprint({"model": 2}, "ours")))
    tier.evict(ours)
    assert not tier.has_relative(KVKey(chunk, fingerprint({"model": 2}, "ours")))
