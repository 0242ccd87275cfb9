"""Fetch: reads begun ahead of whoever takes them, in order, bounded, to be given up."""

import threading

import pytest

from cacheblend_rag.kv import DiskTier, HostTier, Lookup, TieredKVStore
from cacheblend_rag.kv import store as store_module

from .samples import (
    OTHER_FINGERPRINT,
    SlowTier,
    chunk_files,
    make_key,
    make_kv,
    same,
    until,
)

KEYS = [make_key(number) for number in range(8)]


@pytest.fixture
def gate():
    """Reads wait for it to be set, so that a test says when they end."""
    gate = threading.Event()
    yield gate
    gate.set()


@pytest.fixture
def slow(gate):
    tier = SlowTier(lambda: gate.wait(10))
    tier.fill(KEYS)
    return tier


@pytest.fixture
def store(slow):
    with TieredKVStore([HostTier(None), slow]) as store:
        yield store
        slow.gate = lambda: None


@pytest.fixture
def little_room(monkeypatch):
    monkeypatch.setattr(store_module, "FETCHED_AHEAD", 3)


def test_chunks_come_in_order_whatever_they_took(tmp_path):
    with TieredKVStore([DiskTier(tmp_path)]) as store:
        for number in (0, 2, 3):
            store.put(KEYS[number], make_kv(number))
        store.put(make_key(5, of=OTHER_FINGERPRINT), make_kv())
        damaged = next(path for path in chunk_files(tmp_path) if str(KEYS[3]) in path.name)
        damaged.write_bytes(b"rubbish")
        with store.fetch([KEYS[2], KEYS[1], KEYS[0], KEYS[3], KEYS[5], KEYS[2]]) as fetch:
            assert len(fetch) == 6
            found = [fetch.take() for _ in range(6)]
            assert not fetch
            assert fetch.wait(0)
            with pytest.raises(IndexError):
                fetch.take()
    assert [lookup.reason for lookup in found] == [
        None,
        "not stored",
        None,
        "damaged",
        "other model",
        None,
    ]
    for index, number in ((0, 2), (2, 0), (5, 2)):
        assert found[index].tier == "disk"
        assert same(found[index].kv, make_kv(number))


def test_eight_chunks_are_read_at_once_and_once_each():
    everybody = threading.Barrier(len(KEYS), timeout=10)
    tier = SlowTier(everybody.wait)
    tier.fill(KEYS)
    with TieredKVStore([HostTier(None), tier]) as store:
        fetch = store.fetch(KEYS)
        found = [fetch.take() for _ in KEYS]
    assert tier.most_at_once == len(KEYS)
    assert sorted(map(str, tier.keys)) == sorted(map(str, KEYS))
    for number, lookup in enumerate(found):
        assert same(lookup.kv, make_kv(number))


def test_to_fetch_returns_at_once_and_to_wait_is_bounded(store, gate):
    with store.fetch(KEYS) as fetch:
        assert not fetch.wait(0.01)
        assert len(fetch) == len(KEYS)
        gate.set()
        assert fetch.wait(10)
        assert fetch.take().tier == "slow"


def test_chunks_found_below_are_kept_above_unless_asked_not_to(store, gate):
    gate.set()
    host = store.tiers[0]
    with store.fetch(KEYS[:2], promote=False) as fetch:
        assert [fetch.take().tier for _ in range(2)] == ["slow", "slow"]
    assert host.usage().entries == 0
    for expected in ("slow", "host"):
        with store.fetch(KEYS[:2]) as fetch:
            assert [fetch.take().tier for _ in range(2)] == [expected, expected]


def test_two_fetches_of_one_chunk_read_it_once(store, slow, gate):
    with store.fetch(KEYS[:1]) as one, store.fetch(KEYS[:1]) as other:
        assert until(lambda: len(slow.keys) == 1)
        gate.set()
        assert {one.take().tier, other.take().tier} == {"slow", "host"}
    assert slow.keys == KEYS[:1]


def test_an_eviction_during_a_fetch_is_not_undone_by_the_promotion(store, slow, gate):
    with store.fetch(KEYS[:1]) as fetch:
        assert until(lambda: len(slow.keys) == 1)
        evictor = threading.Thread(target=store.evict, args=(KEYS[0],))
        evictor.start()
        gate.set()
        fetch.take()
        evictor.join(10)
    assert not any(tier.contains(KEYS[0]) for tier in store.tiers)


def test_no_more_is_read_ahead_than_there_is_room_for(little_room, slow, gate):
    with TieredKVStore([slow]) as store, store.fetch(KEYS) as fetch:
        assert until(lambda: len(slow.keys) == 3)
        gate.set()
        assert until(lambda: fetch.wait(0))
        assert len(slow.keys) == 3
        for taken in range(1, 6):
            assert fetch.take().tier == "slow"
            assert until(lambda taken=taken: len(slow.keys) == 3 + taken)
        assert [fetch.take().tier for _ in range(3)] == ["slow"] * 3


def test_whoever_is_next_is_read_though_others_took_all_the_room(little_room, slow, gate):
    with TieredKVStore([slow]) as store, store.fetch(KEYS[:6]) as first:
        assert until(lambda: len(slow.keys) == 3)
        gate.set()
        second = store.fetch(KEYS[6:])
        assert set(slow.keys) == set(KEYS[:3])
        assert same(second.take().kv, make_kv(6))
        assert same(second.take().kv, make_kv(7))
        assert same(first.take().kv, make_kv(0))


def test_closing_drops_what_has_not_begun_and_gives_the_room_back(
    monkeypatch, little_room, slow, gate
):
    monkeypatch.setattr(store_module, "FETCH_THREADS", 2)
    with TieredKVStore([slow]) as store:
        given_up = store.fetch(KEYS)
        assert until(lambda: len(slow.keys) == 2)
        given_up.close()
        assert not given_up
        assert given_up.wait(0)
        gate.set()
        with store.fetch(KEYS[5:]) as fetch:
            for number in (5, 6, 7):
                assert same(fetch.take().kv, make_kv(number))
        assert set(slow.keys) == {*KEYS[:2], *KEYS[5:]}
        # All of the room is there again: three reads begin before any is taken.
        assert until(lambda: store._room_ahead._value == 3)
        slow.keys.clear()
        with store.fetch(KEYS):
            assert until(lambda: len(slow.keys) == 3)


def test_what_cannot_be_read_any_more_is_a_miss():
    store = TieredKVStore([HostTier(None)])
    store.put(KEYS[0], make_kv())
    store.close()
    with store.fetch(KEYS[:1]) as fetch:
        assert fetch.take() == Lookup(None, None, "store error")


def test_closing_the_store_ends_a_fetch(monkeypatch, slow, gate):
    monkeypatch.setattr(store_module, "FETCH_THREADS", 1)
    store = TieredKVStore([slow])
    fetch = store.fetch(KEYS[:2])
    assert until(lambda: len(slow.keys) == 1)
    threading.Timer(0.05, gate.set).start()
    store.close()
    assert fetch.take().reason in {None, "not stored"}
    assert fetch.take() == Lookup(None, None, "store error")


@pytest.mark.parametrize(("verb", "pool"), [("prefetch", "_pool"), ("fetch", "_fetching")])
def test_a_store_that_closes_reads_no_more_than_it_has_begun(verb, pool, gate):
    tier = SlowTier(lambda: gate.wait(10))
    keys = [make_key(number) for number in range(32)]
    tier.fill(keys)
    store = TieredKVStore([HostTier(None), tier])
    getattr(store, verb)(keys)
    assert until(lambda: tier.keys)
    closing = threading.Thread(target=store.close)
    closing.start()
    assert until(lambda: getattr(store, pool)._shutdown)
    gate.set()
    closing.join(10)
    assert not closing.is_alive()
    assert 0 < len(tier.keys) <= store_module.FETCH_THREADS
