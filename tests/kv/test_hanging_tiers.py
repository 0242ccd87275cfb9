"""A tier that hangs holds up what is asked of it, and nothing else: no thread or lock is shared."""

import threading
import time

import pytest

from cacheblend_rag.kv import HostTier, StoredChunk, TieredKVStore, opening

from .samples import SlowTier, make_key, make_kv, same, taken, until

HANGING = [make_key(number) for number in range(20)]
NEAR, BELOW = make_key(50), make_key(51)


@pytest.fixture
def hanging(gate):
    tier = SlowTier(lambda: gate.wait(30), name="hanging")
    tier.fill(HANGING)
    return tier


def filled(name, *keys):
    tier = HostTier(None, name=name)
    for key in keys:
        tier.put(key, StoredChunk(make_kv(9), time.time()))
    return tier


@pytest.mark.parametrize("order", ["above", "below"])
def test_reads_that_hang_in_one_tier_delay_no_other(hanging, gate, order):
    other = filled("other", BELOW)
    tiers = [hanging, other] if order == "above" else [other, hanging]
    with TieredKVStore([filled("host", NEAR), *tiers]) as store:
        stuck = [store.fetch([key]) for key in HANGING]
        assert until(lambda: len(hanging.keys) == opening.FETCH_THREADS)
        if order == "above":  # what is not in memory has to be asked for there first
            store.tiers[0].put(BELOW, StoredChunk(make_kv(9), time.time()))
        for key in (NEAR, BELOW):
            with store.fetch([key]) as source:
                assert source.wait(10)
                assert same(taken(source)[0].kv, make_kv(9))
        gate.set()
        for source, number in zip(stuck, range(20), strict=True):
            assert same(taken(source)[0].kv, make_kv(number))
            source.close()


def test_memory_is_read_while_the_same_chunk_is_stored_in_a_tier_that_hangs(gate):
    class Stuck(HostTier):
        def _save(self, key, chunk):
            gate.wait(30)

    host = filled("host", NEAR)
    with TieredKVStore([host, Stuck(name="stuck")]) as store:
        writer = threading.Thread(target=store.put, args=(NEAR, make_kv(9)))
        writer.start()
        with store.fetch([NEAR]) as source:
            assert source.wait(10)
            assert same(taken(source)[0].kv, make_kv(9))
        gate.set()
        writer.join()


@pytest.mark.parametrize("how", ["evict", "put"])
def test_what_is_evicted_or_replaced_while_it_is_looked_for_is_not_kept(hanging, gate, how):
    """No lock is held meanwhile, so the change is not waited for, and it stands."""
    hanging.takes_puts = False
    host = HostTier(None)
    with TieredKVStore([host, hanging]) as store:
        source = store.fetch(HANGING[:1])
        assert until(lambda: len(hanging.keys) == 1)
        if how == "evict":
            store.evict(HANGING[0])
        else:
            store.put(HANGING[0], make_kv(77))
        gate.set()
        assert source.wait(10)
        source.take()
        source.close()
        kept = store.tiers[0].get(HANGING[0])
        assert kept is None if how == "evict" else same(kept.kv, make_kv(77))
