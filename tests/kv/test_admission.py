"""What a full tier takes: counted in hits, against plain least-recently-used in the same run."""

import time

import pytest

from cacheblend_rag.kv import DiskTier, HostTier, StoredChunk, TieredKVStore, TierPolicy
from cacheblend_rag.kv.tiers import disk_index

from .samples import chunk_files, encode, make_key, make_kv, same

CHUNK = make_kv().nbytes
FILE = len(encode(make_key(0), make_kv()))


def make_store(chunks, *, admit="frequency", corpus=0):
    """Memory for so many chunks above a tier that holds the whole corpus."""
    policy = TierPolicy(chunks * CHUNK, admit=admit)
    below = HostTier(None, name="below")
    for number in range(corpus):
        assert below.put(make_key(number), StoredChunk(make_kv(number), time.time()))
    return TieredKVStore([HostTier(policy=policy), below])


def hits(store, numbers):
    """How many of these requests the memory answered; all are answered, and rightly."""
    found = [(number, store.get(make_key(number))) for number in numbers]
    assert all(same(lookup.kv, make_kv(number)) for number, lookup in found)
    return sum(lookup.tier == "host" for _, lookup in found)


@pytest.mark.parametrize("corpus", [12, 40])
def test_a_loop_larger_than_memory_still_hits_what_fits(corpus):
    """Plain LRU drops each chunk just before its turn comes again."""
    room, rounds = 10, 30
    found = {}
    for admit in ("always", "frequency"):
        with make_store(room, admit=admit, corpus=corpus) as store:
            hits(store, [*range(corpus)] * 3)
            found[admit] = hits(store, [*range(corpus)] * rounds)
            assert store.stats()["host"]["bytes"] == room * CHUNK
            assert store.stats()["host"]["refused"] == 0
    assert found["always"] == 0
    assert found["frequency"] >= 0.95 * room * rounds


def test_what_is_seen_once_does_not_drive_out_what_is_seen_often():
    often, once = [*range(10)] * 5, range(100, 400)
    found = {}
    for admit in ("always", "frequency"):
        with make_store(10, admit=admit, corpus=400) as store:
            hits(store, often)
            hits(store, once)
            found[admit] = hits(store, range(10))
            host = store.stats()["host"]
            assert (host["rejected"] > 0) == (admit == "frequency")
            assert host["admitted"] <= host["evictions"]
    assert found == {"always": 0, "frequency": 10}


def test_what_comes_to_be_asked_for_takes_the_place_of_what_no_longer_is():
    with make_store(10, corpus=40) as store:
        hits(store, [*range(10)] * 20)
        fresh = [*range(20, 30)]
        for _ in range(200):
            hits(store, fresh)
            if hits(store, fresh) == 10:
                break
        assert hits(store, fresh) == 10


# Disks that several processes share


def disk(folder, chunks):
    return DiskTier(folder, chunks * FILE)


def test_what_another_process_reads_is_not_driven_out_by_what_is_new(tmp_path, clock, monkeypatch):
    """Two stores stand for two processes: neither knows what the other sees."""
    monkeypatch.setattr(disk_index, "NOTED_SECONDS", 0.0)
    with TieredKVStore([disk(tmp_path, 10)]) as serving:
        for number in range(10):
            serving.put(make_key(number), make_kv(number))
        clock.advance(3600)
        for number in range(6):
            assert serving.get(make_key(number)).tier == "disk"
        with TieredKVStore([disk(tmp_path, 10)]) as indexing:
            taken = [indexing.put(make_key(n), make_kv(n)).stored for n in range(100, 120)]
            assert sum(taken) == 20, "chunks that nobody read make room"
        assert all(serving.contains(make_key(number)) for number in range(6))
        assert sum(path.stat().st_size for path in chunk_files(tmp_path)) <= 10 * FILE
        assert serving.tiers[0].usage().nbytes == 10 * FILE
