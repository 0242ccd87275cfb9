import os
import threading
import time

import pytest

from cacheblend_rag.errors import StoreError
from cacheblend_rag.kv import ChunkKV, DiskTier, HostTier, Lookup, StoredChunk, TieredKVStore
from tests.engines.test_forked import told_by

from .samples import SlowTier, chunk_files, encode, make_key, make_kv, same

KEYS = [make_key(number) for number in range(6)]
HOST_CHUNK = make_kv().nbytes
DISK_CHUNK = len(encode(KEYS[0], make_kv()))


@pytest.fixture
def open_store(tmp_path):
    """Open stores on one folder; all are closed at the end."""
    stores = []

    def open_(**options):
        stores.append(TieredKVStore.open(**{"kv_path": tmp_path, **options}))
        return stores[-1]

    yield open_
    for store in stores:
        store.close()


@pytest.fixture
def store(open_store):
    return open_store()


def tiers_holding(store, key):
    return [tier.name for tier in store.tiers if tier.contains(key)]


class SlowDisk(DiskTier):
    """Counts loads, and holds each back until told to go on."""

    def __init__(self, path):
        super().__init__(path)
        self.loads = 0
        self.loading, self.go_on = threading.Event(), threading.Event()

    def _open(self, key):
        self.loads += 1
        self.loading.set()
        assert self.go_on.wait(5)
        return super()._open(key)


class Unlisted(HostTier):
    """Memory that nobody may list; counts how often it is asked for how many chunks."""

    def __init__(self, name="unlisted"):
        super().__init__(None, name=name)
        self.asked = []

    def entries(self):
        raise AssertionError("was listed")

    def entry_many(self, keys):
        self.asked.append(("entries", len(keys)))
        return super().entry_many(keys)

    def get_many(self, keys):
        self.asked.append(("chunks", len(keys)))
        return super().get_many(keys)


def test_what_is_put_is_found_in_every_tier(store):
    assert store.put(KEYS[0], make_kv())
    assert tiers_holding(store, KEYS[0]) == ["host", "disk"]
    found = store.get(KEYS[0])
    assert (found.tier, found.reason) == ("host", None)
    assert same(found.kv, make_kv())


def test_what_was_never_put_is_not_stored(store):
    assert store.get(KEYS[0]) == Lookup(None, None, "not stored")
    assert not store.contains(KEYS[0])
    assert store.nbytes(KEYS[0]) is None
    assert not store.evict(KEYS[0])


def test_questions_about_keys_read_nothing(open_store):
    open_store().put(KEYS[1], make_kv())
    store = open_store(host_bytes=0)
    assert store.contains_many(KEYS[:3]) == [False, True, False]
    assert store.nbytes(KEYS[1]) == DISK_CHUNK
    assert store.keys() == [KEYS[1]]
    stats = store.stats()["disk"]
    assert (stats["hits"], stats["misses"]) == (0, 0)


def test_a_hit_below_is_not_promoted_when_asked_not_to(open_store):
    open_store().put(KEYS[0], make_kv())
    store = open_store()
    for _ in range(2):
        assert store.get(KEYS[0], promote=False).tier == "disk"
    assert tiers_holding(store, KEYS[0]) == ["disk"]


def test_many_are_read_from_a_slow_tier_at_once_and_once_each():
    everybody = threading.Barrier(len(KEYS), timeout=10)
    slow = SlowTier(everybody.wait)
    slow.fill(KEYS)
    with TieredKVStore([HostTier(None), slow]) as store:
        found = store.get_many([*KEYS, *KEYS])
        assert slow.most_at_once == len(slow.keys) == len(KEYS)
        for number, lookup in enumerate(found):
            assert lookup.tier == "slow"
            assert same(lookup.kv, make_kv(number % len(KEYS)))
        assert {lookup.tier for lookup in store.get_many(KEYS)} == {"host"}


def test_each_tier_is_asked_once_for_what_the_ones_before_lack():
    near, far = Unlisted("near"), Unlisted("far")
    with TieredKVStore([near, far]) as store:
        for number, key in enumerate(KEYS[:2]):
            near.put(key, StoredChunk(make_kv(number), time.time()))
        for number, key in enumerate(KEYS[:4]):
            far.put(key, StoredChunk(make_kv(number), time.time()))
        assert store.contains_many([*KEYS, KEYS[0]]) == [True] * 4 + [False] * 2 + [True]
        assert [near.asked, far.asked] == [[("entries", 6)], [("entries", 4)]]
        found = store.get_many(KEYS)
        assert [near.asked[1:], far.asked[1:]] == [[("chunks", 6)], [("chunks", 4)]]
        assert [lookup.tier for lookup in found] == ["near"] * 2 + ["far"] * 2 + [None] * 2


def test_reading_many_waits_for_a_load_of_one_of_them(tmp_path):
    disk = SlowDisk(tmp_path)
    for number in range(2):
        disk.put(KEYS[number], StoredChunk(make_kv(number), time.time()))
    with TieredKVStore([HostTier(None), disk]) as store:
        store.prefetch([KEYS[0]])
        assert disk.loading.wait(5)
        found = []
        reader = threading.Thread(target=lambda: found.extend(store.get_many(KEYS[:2])))
        reader.start()
        disk.go_on.set()
        reader.join(5)
        assert [lookup.tier for lookup in found] == ["host", "disk"]
        assert disk.loads == 2


def test_a_tier_says_whether_it_keeps_what_is_found_below():
    tiers = [HostTier(None, name=name) for name in ("near", "between", "far")]
    tiers[1].keeps_found = False
    with TieredKVStore(tiers) as store:
        tiers[2].put(KEYS[0], StoredChunk(make_kv(), time.time()))
        assert store.get(KEYS[0]).tier == "far"
        assert tiers_holding(store, KEYS[0]) == ["near", "far"]
        assert store.put(KEYS[1], make_kv())
        assert tiers_holding(store, KEYS[1]) == ["near", "between", "far"]


def test_chunks_expire_in_every_tier(open_store, clock):
    store = open_store(ttl_seconds=100)
    store.put(KEYS[0], make_kv())
    clock.advance(99)
    assert store.get(KEYS[0]).tier == "host"
    clock.advance(2)
    assert not store.contains(KEYS[0])
    assert store.keys() == []
    assert store.get(KEYS[0]).reason == "not stored"
    assert tiers_holding(store, KEYS[0]) == []
    assert [stats["expired"] for stats in store.stats().values()] == [1, 1]


def test_use_and_promotion_do_not_prolong_a_chunks_life(open_store, clock):
    open_store().put(KEYS[0], make_kv())
    store = open_store(ttl_seconds=100)
    for _ in range(2):
        clock.advance(40)
        assert store.get(KEYS[0]).kv is not None
    store.tiers[1].evict(KEYS[0])
    clock.advance(21)
    assert not store.contains(KEYS[0])


def test_verify_counts_sweeps_and_reports_progress(open_store, clock):
    store = open_store(ttl_seconds=100)
    store.put(KEYS[0], make_kv())
    clock.advance(101)
    for key in KEYS[1:4]:
        store.put(key, make_kv())
    seen = []
    report = store.verify(progress=lambda done, total: seen.append((done, total)))
    assert (report.checked, report.damaged) == (3, ())
    assert report.expired == 2
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_verify_names_damage_and_quarantines_only_when_asked(open_store, tmp_path):
    store = open_store(host_bytes=0)
    for number in range(3):
        store.put(KEYS[number], make_kv(number))
    victim = next(path for path in chunk_files(tmp_path) if str(KEYS[1]) in path.name)
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1
    victim.write_bytes(data)
    for repair in (False, True):
        (found,) = store.verify(repair=repair).damaged
        assert (found.tier, found.key) == ("disk", KEYS[1])
        assert "checksum" in found.reason
        assert victim.exists() is not repair
    assert store.verify().checked == 2
    (name,) = store.tiers[0].quarantined()
    assert (tmp_path / "quarantine" / name).read_bytes() == data


def test_prefetch_stops_when_memory_is_full(tmp_path):
    filled = TieredKVStore([DiskTier(tmp_path)])
    for key in KEYS:
        filled.put(key, make_kv())
    disk = SlowDisk(tmp_path)
    disk.go_on.set()
    store = TieredKVStore([HostTier(2 * DISK_CHUNK), disk])
    store.prefetch(KEYS)
    store.prefetching.close(cancel=False)
    assert disk.loads == 2
    assert all(store.tiers[0].contains(key) for key in KEYS[:2])


def test_malformed_chunk_kv_is_an_error_and_is_stored_nowhere(store):
    kv = make_kv()
    with pytest.raises(ValueError, match="values are"):
        store.put(KEYS[0], ChunkKV.of(kv.keys, kv.values[:1], 0))
    assert store.keys() == []


def test_tiers_need_names_of_their_own():
    with pytest.raises(StoreError, match="host, host"):
        TieredKVStore([HostTier(1), HostTier(2)])


def test_a_path_that_is_a_file_is_an_error(open_store, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot keep chunk KV"):
        open_store(kv_path=tmp_path / "file")


def test_an_expiry_waits_for_whoever_uses_the_chunk(open_store, clock):
    store = open_store(ttl_seconds=10)
    store.put(make_key(0), make_kv())
    clock.advance(11)
    sweeping = threading.Thread(target=store.evict_expired)
    with store.locks.held(make_key(0)):
        sweeping.start()
        sweeping.join(0.3)
        assert sweeping.is_alive()
    sweeping.join(20)
    assert not sweeping.is_alive()


def test_a_chunk_that_was_stored_again_since_it_was_opened_stays(clock):
    tier = HostTier()
    with TieredKVStore([tier], ttl_seconds=100) as store:
        store.put(make_key(1), make_kv())
        clock.advance(200)
        own, again = tier.open, []

        def opened(key):
            """What is read is expired; another process stores it anew before it is removed."""
            found = own(key)
            if not again:
                again.append(key)
                assert tier.put(key, StoredChunk(make_kv(), clock.now))
            return found

        tier.open = opened
        with store.fetch([make_key(1)]) as source:
            assert source.take().reason == "not stored"
        assert again
        assert store.get(make_key(1)).kv is not None


def test_nothing_is_put_into_a_tier_that_takes_no_puts():
    near, below = HostTier(), HostTier(name="below")
    near.takes_puts = False
    with TieredKVStore([near, below]) as store:
        assert store.put(KEYS[0], make_kv())
        assert not store.tiers[0].contains(KEYS[0])
        assert store.get(KEYS[0]).tier == "below"
        assert store.get(KEYS[0]).tier == "host", "what is found below is kept"


USES = {
    "get": lambda store: store.get(KEYS[0]),
    "fetch": lambda store: store.fetch(KEYS),
    "put": lambda store: store.put(KEYS[1], make_kv()),
    "pin": lambda store: store.pin(KEYS[0]),
    "keys": lambda store: store.keys(),
}


@pytest.mark.parametrize("use", USES)
def test_a_forked_process_is_told_to_open_the_store_itself(use, open_store):
    store = open_store()
    store.put(KEYS[0], make_kv())
    told = told_by(lambda: USES[use](store))
    assert told.startswith("StoreError: the store was opened before this process was forked, ")
    assert told_by(store.close) == "None"
    assert same(store.get(KEYS[0]).kv, make_kv())


def test_release_frees_memory_but_for_pinned_chunks():
    with TieredKVStore([HostTier()]) as store:
        for number, key in enumerate(KEYS[:3]):
            assert store.put(key, make_kv(number))
        store.pin(KEYS[1])
        nbytes = store.nbytes(KEYS[1])
        assert store.release() == 2 * nbytes
        assert store.contains_many(KEYS[:3]) == [False, True, False]
        store.unpin(KEYS[1])
        assert store.release() == nbytes
        assert store.release() == 0


def test_what_is_past_its_time_in_a_read_only_store_is_not_served_and_not_removed(
    open_store, tmp_path
):
    writer = open_store()
    for number, key in enumerate(KEYS[:3]):
        assert writer.put(key, make_kv(number))
    left = chunk_files(tmp_path)[0].with_suffix(".safetensors.0.tmp")  # by a killed writer
    left.write_bytes(b"half")
    for path in (left, *chunk_files(tmp_path)):
        os.utime(path, (time.time() - 10_000,) * 2)

    def seen():
        files = sorted(path for path in tmp_path.rglob("*") if path.is_file())
        return [(path, path.stat().st_mtime_ns, path.read_bytes()) for path in files]

    before = seen()
    store = open_store(read_only=True, ttl_seconds=5_000)
    assert store.contains_many(KEYS[:3]) == [False] * 3
    assert [found.reason for found in store.get_many(KEYS[:3])] == ["not stored"] * 3
    assert seen() == before
