"""What a full tier takes: counted in hits, against plain least-recently-used in the same run."""

import time

import pytest

from cacheblend_rag.kv import DiskTier, HostTier, StoredChunk, TieredKVStore, TierPolicy, Usage
from cacheblend_rag.kv.tiers import disk_index
from cacheblend_rag.kv.tiers.admission import (
    LEAST_HALVED,
    LOOKED_AT,
    Capacity,
    RejectedError,
    Resident,
)
from cacheblend_rag.kv.tiers.policy import Counters

from .samples import SlowTier, chunk_files, encode, make_key, make_kv, same, until

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


def test_memory_alone_admits_what_is_put_again():
    """Without a tier below a chunk that was turned away is stored once it is computed often."""
    policy = TierPolicy(2 * CHUNK)
    with TieredKVStore([HostTier(policy=policy)]) as store:
        for number in (0, 1):
            store.put(make_key(number), make_kv(number))
            store.get(make_key(number))
        taken = [store.put(make_key(2), make_kv(2)).stored for _ in range(4)]
        assert taken == [False, False, False, True]
        assert store.stats()["host"]["rejected"] == 3
        assert store.stats()["host"]["admitted"] == 1


def test_a_tiers_own_time_to_live_is_its_copys_alone(clock):
    tiers = [HostTier(policy=TierPolicy(ttl_seconds=10)), HostTier(None, name="below")]
    with TieredKVStore(tiers, ttl_seconds=100) as store:
        store.put(make_key(0), make_kv())
        clock.advance(11)
        assert store.get(make_key(0), promote=False).tier == "below"
        assert not tiers[0].contains(make_key(0))
        clock.advance(90)
        assert store.get(make_key(0)).reason == "not stored"


def test_nothing_is_read_ahead_that_memory_would_turn_away():
    slow = SlowTier(lambda: None)
    slow.fill(make_key(number) for number in range(20))
    with TieredKVStore([HostTier(5 * CHUNK), slow]) as store:
        hits_of = [store.get(make_key(n)).tier for n in [*range(5)] * 3]
        assert hits_of == ["slow"] * 5 + ["host"] * 10
        slow.keys.clear()
        store.prefetch(make_key(number) for number in range(20))
        for _ in range(6):
            store.get(make_key(7), promote=True)
        store.evict(make_key(4))
        store.prefetch([make_key(8)])
        assert until(lambda: store.tiers[0].contains(make_key(8)))
        assert set(slow.keys) == {make_key(7), make_key(8)}


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


@pytest.mark.parametrize(("hours_ago", "taken"), [(1, False), (30, True)])
def test_what_was_read_long_ago_makes_room(tmp_path, clock, hours_ago, taken):
    with TieredKVStore([disk(tmp_path, 2)]) as before:
        for number in range(2):
            before.put(make_key(number), make_kv(number))
            before.get(make_key(number))
    clock.advance(3600 * hours_ago)
    with TieredKVStore([disk(tmp_path, 2)]) as later:
        assert later.put(make_key(5), make_kv(5)).stored == taken


def test_what_would_be_taken_is_what_is_taken():
    """Of many chunks that are asked for often, one that is not lies just out of sight."""
    tier = HostTier(LOOKED_AT * CHUNK + CHUNK)
    for number in range(LOOKED_AT + 1):
        tier.put(make_key(number), StoredChunk(make_kv(number), time.time()))
        if number < LOOKED_AT:
            tier.see([make_key(number)] * 9)
    new = make_key(100)
    tier.see([new])
    assert not tier.would_take(new, CHUNK)
    assert not tier.put(new, StoredChunk(make_kv(100), time.time()))
    tier.evict(make_key(0))
    for key in (make_key(0), new):
        assert tier.would_take(key, CHUNK)


# The counts and the choice


def test_counts_are_halved_in_time_and_what_was_seen_once_is_forgotten():
    capacity, seen = Capacity(TierPolicy(100), Counters()), make_key(0)
    once = [make_key(number) for number in range(1, LEAST_HALVED - 5)]
    capacity.see([seen] * 6 + once)
    for key, count in ((seen, 3), (once[0], 0)):
        with pytest.raises(RejectedError, match=f"^requested {count} times, "):
            capacity.victims(key, 100, Usage(1, 100), [Resident(make_key(9999), 100, seen=9)])


def test_large_chunks_are_weighed_by_what_all_they_drive_out_is_worth():
    capacity = Capacity(TierPolicy(1000), Counters())
    large, small = make_key(0), [make_key(number) for number in range(1, 11)]
    residents = [Resident(key, 100) for key in small]
    for key in small[:8]:
        capacity.see([key] * 4)
    capacity.see([large] * 3)
    assert capacity.victims(large, 200, Usage(10, 1000), residents) == small[8:]
    with pytest.raises(
        RejectedError, match=r"^requested 3 times, the chunks to evict 2\.66667 times$"
    ):
        capacity.victims(large, 600, Usage(10, 1000), residents)
