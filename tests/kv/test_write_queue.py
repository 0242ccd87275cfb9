"""Chunks written behind: found at once, written in order, evicted for good, lost only aloud."""

import threading
import time

import pytest

from cacheblend_rag.kv import (
    DiskTier,
    HostTier,
    StoredChunk,
    TieredKVStore,
    TierPolicy,
    write_queue,
)
from cacheblend_rag.kv.tiers.breaker import Breaker
from cacheblend_rag.kv.write_queue import WriteQueue

from .samples import make_key, make_kv, same, taken, until
from .test_faults import finish, run_python

KEYS = [make_key(number) for number in range(6)]
BEHIND = TierPolicy(write="behind")
CHUNK = make_kv().nbytes


class Held(HostTier):
    """Memory below, whose writes wait until they are let go on; written: the keys, in order."""

    def __init__(self, policy=BEHIND):
        super().__init__(name="far", policy=policy)
        self.begun, self.go_on, self.written = threading.Semaphore(0), threading.Event(), []

    def _save(self, key, chunk):
        self.begun.release()
        assert self.go_on.wait(20)
        super()._save(key, chunk)
        self.written.append(key)


@pytest.fixture
def held():
    """A store with nothing above such a tier."""
    tier = Held()
    with TieredKVStore([tier]) as store:
        yield store, tier
        tier.go_on.set()


def idle(tier):
    return until(lambda: not tier.queued())


def test_a_put_does_not_wait_and_what_it_put_is_found_at_once(held):
    store, tier = held
    for number, key in enumerate(KEYS):
        assert store.put(key, make_kv(number))
    assert tier.begun.acquire(timeout=10)
    assert tier.usage().entries == 0
    assert store.contains_many([*KEYS, make_key(9)]) == [True] * 6 + [False]
    found = store.get_many([make_key(9), *KEYS])
    assert found[0].reason == "not stored"
    for number, lookup in enumerate(found[1:]):
        assert lookup.tier == "far"
        assert same(lookup.kv, make_kv(number))
    assert set(store.keys()) == set(KEYS)
    assert store.stats()["far"]["queued"] == 6
    tier.go_on.set()
    assert idle(tier)
    assert tier.written == KEYS
    assert store.stats()["far"]["queued"] == 0
    assert same(store.get(KEYS[3]).kv, make_kv(3))


def test_prompts_read_what_waits(held):
    store, tier = held
    store.put(KEYS[0], make_kv())
    assert tier.begun.acquire(timeout=10)
    with store.fetch(KEYS[:2]) as source:
        found, absent = taken(source)
    assert found.tier == "far"
    assert same(found.kv, make_kv())
    assert absent.reason == "not stored"


def test_a_newer_chunk_replaces_one_that_waits_and_one_just_being_written(held):
    store, tier = held
    for number, key in enumerate(KEYS[:2]):
        store.put(key, make_kv(number))
    assert tier.begun.acquire(timeout=10)
    for number, key in enumerate(KEYS[:2]):
        store.put(key, make_kv(50 + number))
        assert same(store.get(key).kv, make_kv(50 + number))
    tier.go_on.set()
    assert idle(tier)
    assert tier.written == [KEYS[0], KEYS[1], KEYS[0]]
    for number, key in enumerate(KEYS[:2]):
        assert same(store.get(key).kv, make_kv(50 + number))


def test_an_eviction_reaches_what_waits_and_what_is_just_being_written(held):
    store, tier = held
    for key in KEYS[:3]:
        store.put(key, make_kv())
    assert tier.begun.acquire(timeout=10)
    assert store.evict(KEYS[1])
    assert not store.contains(KEYS[1])
    threading.Timer(0.1, tier.go_on.set).start()
    assert store.evict(KEYS[0])
    assert not store.contains(KEYS[0])
    assert idle(tier)
    assert tier.written == [KEYS[0], KEYS[2]]
    assert store.keys() == [KEYS[2]]
    assert store.evict_where(lambda key, entry: True) == 1


def test_listing_and_age_count_what_waits(held, clock):
    store, _ = held
    for tier in store.tiers:
        tier.ttl_seconds = 10
    store.put(KEYS[1], make_kv())
    clock.advance(11)
    store.put(KEYS[0], make_kv())
    threading.Timer(0.1, held[1].go_on.set).start()
    assert store.get(KEYS[1]).reason == "not stored"
    assert store.keys() == [KEYS[0]]


def test_closing_writes_what_waits(tmp_path):
    with TieredKVStore([DiskTier(tmp_path, policy=BEHIND)]) as store:
        for number, key in enumerate(KEYS):
            store.put(key, make_kv(number))
    with TieredKVStore([DiskTier(tmp_path)]) as store:
        for number, key in enumerate(KEYS):
            assert same(store.get(key).kv, make_kv(number))


@pytest.mark.parametrize("digests", ["at once", "beside"])
def test_a_process_that_ends_without_closing_writes_what_waits(tmp_path, digests):
    process = run_python(
        """
        from cacheblend_rag.kv import TierPolicy
        if sys.argv[2] == "beside":
            disk_module.BESIDE_BYTES = 0
        tier = DiskTier(folder, policy=TierPolicy(write="behind"))
        for number in range(20):
            tier.put(make_key(number), StoredChunk(make_kv(number), time.time()))
        """,
        str(tmp_path),
        digests,
    )
    finish(process)
    assert DiskTier(tmp_path).usage().entries == 20


def test_what_finds_no_room_is_dropped_counted_and_said(held, caplog, monkeypatch):
    store, tier = held
    monkeypatch.setattr(write_queue, "ROOM_BYTES", 3 * CHUNK)
    taken = [store.put(key, make_kv()).stored for key in KEYS[:5]]
    assert taken == [True] * 3 + [False] * 2
    assert store.put(KEYS[1], make_kv(7)), "in place of the one that waits"
    assert store.stats()["far"]["dropped"] == 2
    assert [message for message in caplog.messages if "full" in message] == [
        f"far tier: {key} is not stored: the write queue is full" for key in KEYS[3:5]
    ]
    assert not store.contains(KEYS[4])
    tier.go_on.set()
    assert idle(tier)
    assert store.put(KEYS[4], make_kv())


def test_a_chunk_larger_than_the_room_is_written_alone(held, monkeypatch):
    store, _ = held
    monkeypatch.setattr(write_queue, "ROOM_BYTES", CHUNK - 1)
    assert store.put(KEYS[0], make_kv())
    assert not store.put(KEYS[1], make_kv())


def test_what_cannot_be_written_in_time_is_lost_and_said(caplog, monkeypatch):
    tier = Held()
    for key in KEYS[:3]:
        tier.put(key, StoredChunk(make_kv(), time.time()))
    assert tier.begun.acquire(timeout=10)
    monkeypatch.setattr(write_queue, "DRAIN_SECONDS", 0.05)
    tier.drain()
    assert f"2 chunks ({2 * CHUNK} bytes) are lost" in caplog.text
    assert tier.stats()["dropped"] == 2
    assert not tier.put(KEYS[4], StoredChunk(make_kv(), time.time()))
    tier.go_on.set()
    assert until(lambda: tier.written == KEYS[:1])


def test_what_waits_for_a_tier_that_is_out_is_dropped_and_counted():
    tier = Held()
    tier.access.writing = Breaker(lambda: 0.0)
    tier.access.writing.failed(tier.access.writing.ask())
    with TieredKVStore([tier]) as store:
        store.put(KEYS[0], make_kv())
        assert idle(tier)
        assert store.stats()["far"]["dropped"] == 1
        assert store.get(KEYS[0]).reason == "not stored"


def test_what_is_found_below_is_kept_behind_too():
    near, below = Held(), HostTier(None, name="below")
    below.put(KEYS[0], StoredChunk(make_kv(), time.time()))
    with TieredKVStore([near, below]) as store:
        assert store.get(KEYS[0]).tier == "below"
        assert store.get(KEYS[0]).tier == "far"
        assert near.usage().entries == 0
        near.go_on.set()


def test_nothing_is_put_into_a_tier_that_is_not_written():
    with TieredKVStore([HostTier(policy=TierPolicy(write="none")), Held()]) as store:
        store.tiers[1].go_on.set()
        assert store.put(KEYS[0], make_kv())
        assert not store.tiers[0].contains(KEYS[0])
        assert store.get(KEYS[0]).tier == "far"
        assert store.get(KEYS[0]).tier == "host", "what is found below is kept"


def test_a_chunk_that_waits_holds_on_to_no_larger_storage():
    taken, go_on = [], threading.Event()
    queue = WriteQueue(lambda key, chunk: (go_on.wait(10), taken.append(chunk)), "far")
    wide = make_kv(tokens=5000)
    queue.add(
        KEYS[0], StoredChunk(type(wide)(wide.keys[..., :2, :], wide.values[..., :2, :], 0), 1.0)
    )
    go_on.set()
    queue.close()
    assert taken[0].kv.keys.untyped_storage().nbytes() < wide.keys.untyped_storage().nbytes() / 10


def test_a_thread_that_cannot_be_started_is_a_failed_put_and_the_next_one_tries_again(
    tmp_path, monkeypatch, caplog
):
    def refuse(_):
        raise RuntimeError("can't start new thread")

    with TieredKVStore([DiskTier(tmp_path, policy=BEHIND)]) as store:
        with monkeypatch.context() as short:
            short.setattr(threading.Thread, "start", refuse)
            assert not store.put(KEYS[0], make_kv())
        assert f"{KEYS[0]} is not stored: no thread to write it" in caplog.text
        assert store.stats()["disk"]["dropped"] == 1
        assert store.put(KEYS[1], make_kv(1))
        assert idle(store.tiers[0])
        assert [store.contains(key) for key in KEYS[:2]] == [False, True]


def test_whatever_a_write_raises_the_next_chunk_is_written(caplog):
    class Raising(HostTier):
        def _save(self, key, chunk):
            if key == KEYS[0]:
                raise SystemExit
            super()._save(key, chunk)

    with TieredKVStore([Raising(policy=BEHIND)]) as store:
        for key in KEYS[:2]:
            assert store.put(key, make_kv())
        assert idle(store.tiers[0])
        assert [store.contains(key) for key in KEYS[:2]] == [False, True]
    assert f"{KEYS[0]} is not stored" in caplog.text


def test_a_store_works_in_a_forked_process(tmp_path):
    """Whatever its parent was at: a child stores, finds and closes; nothing is written twice."""
    process = run_python(
        """
        import threading
        from cacheblend_rag.kv import HostTier, TierPolicy
        go_on = threading.Event()
        class Slow(DiskTier):
            def _save(self, key, chunk):
                go_on.wait(20)
                super()._save(key, chunk)
        near, far = HostTier(None), Slow(folder, policy=TierPolicy(write="behind"))
        store = TieredKVStore([near, far])
        for number in range(3):
            assert store.put(make_key(number), make_kv(number))
        stuck = store.fetch([make_key(9)])  # a thread of every kind is there
        stuck.take()
        near._lock.acquire()  # as by a thread that is just at work there
        pid = os.fork()
        if not pid:
            go_on = threading.Event()
            go_on.set()
            assert far.stats()["queued"] == 0, "that is its parent's to write"
            assert store.put(make_key(5), make_kv(5))
            with store.fetch([make_key(5)]) as source:
                assert same(taken(source)[0].kv, make_kv(5))
            store.close()
            os._exit(0 if far.usage().entries == 1 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        near._lock.release()
        go_on.set()
        store.close()
        print(far.usage().entries)
        """,
        str(tmp_path),
    )
    assert finish(process).strip() == "4"
