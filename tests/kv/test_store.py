import pytest

from cacheblend_rag.errors import StoreError
from cacheblend_rag.kv import ChunkKV, DiskTier, HostTier, StoredChunk, TieredKVStore
from tests.engines.test_idle import told_by

from .samples import encode, make_key, make_kv, same

KEYS = [make_key(number) for number in range(6)]
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


def test_questions_about_keys_read_nothing(open_store):
    open_store().put(KEYS[1], make_kv())
    store = open_store(host_bytes=0)
    assert store.contains_many(KEYS[:3]) == [False, True, False]
    assert store.entries()[KEYS[1]].nbytes == DISK_CHUNK
    stats = store.stats()["disk"]
    assert (stats["hits"], stats["misses"]) == (0, 0)


def test_a_hit_below_is_not_promoted_when_asked_not_to(open_store):
    open_store().put(KEYS[0], make_kv())
    store = open_store()
    for _ in range(2):
        assert store.get(KEYS[0], promote=False).tier == "disk"
    assert not store.tiers[0].contains(KEYS[0])


def test_use_and_promotion_do_not_prolong_a_chunks_life(open_store, clock):
    open_store().put(KEYS[0], make_kv())
    store = open_store(ttl_seconds=100)
    for _ in range(2):
        clock.advance(40)
        assert store.get(KEYS[0]).kv is not None
    store.tiers[1].evict(KEYS[0])
    clock.advance(21)
    assert not store.contains(KEYS[0])


def test_prefetch_stops_when_memory_is_full(tmp_path):
    filled = TieredKVStore([DiskTier(tmp_path)])
    for key in KEYS:
        filled.put(key, make_kv())
    store = TieredKVStore([HostTier(2 * DISK_CHUNK), DiskTier(tmp_path)])
    store.prefetch(KEYS)
    store.prefetching.close(cancel=False)
    assert store.tiers[1].stats()["hits"] == 2
    assert all(store.tiers[0].contains(key) for key in KEYS[:2])


def test_malformed_chunk_kv_is_an_error_and_is_stored_nowhere(store):
    kv = make_kv()
    with pytest.raises(ValueError, match="values are"):
        store.put(KEYS[0], ChunkKV.of(kv.keys, kv.values[:1], 0))
    assert store.keys() == []


def test_a_path_that_is_a_file_is_an_error(open_store, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="cannot keep chunk KV"):
        open_store(kv_path=tmp_path / "file")


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
