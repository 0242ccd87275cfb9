"""A tier that fails is left alone, says so, and comes back by itself; no request pays for it."""

import threading
import time

import pytest

from cacheblend_rag.kv import DiskTier, HostTier, StoredChunk, TieredKVStore, TierPolicy
from cacheblend_rag.kv.tiers.breaker import FIRST_SECONDS, MOST_SECONDS, Breaker

from .samples import make_key, make_kv, same, taken, until

KEYS = [make_key(number) for number in range(8)]


class Ticks:
    """A clock that tests move; threads may read it."""

    now = 0.0

    def __call__(self):
        return self.now


class Dead(HostTier):
    """Memory behind a bad line: while ``failure`` is set, each call takes long and raises it.

    stalls: seconds that reading a chunk takes.
    """

    def __init__(self, ticks, *, takes=2.0, fails_whole=False, **options):
        self.fails_whole = fails_whole
        super().__init__(**{"name": "far", **options})
        self.failure, self.takes, self.calls, self.stalls = None, takes, 0, 0.0
        self.guard.reading = Breaker(ticks)
        self.guard.writing = self.guard.reading if fails_whole else Breaker(ticks)
        self._ticks, self._counting = ticks, threading.Lock()

    entries_at_once = reads_at_once = 1

    def _entry(self, key):
        self._call()
        return super()._entry(key)

    def _open(self, key):
        self._call()
        self._ticks.now += self.stalls
        return super()._open(key)

    def _save(self, key, chunk):
        self._call()
        super()._save(key, chunk)

    def _drop(self, key):
        self._call()
        return super()._drop(key)

    def _call(self):
        with self._counting:
            self.calls += 1
        if self.failure is not None:
            self._ticks.now += self.takes
            raise self.failure


@pytest.fixture
def ticks():
    return Ticks()


def filled(tier):
    for number, key in enumerate(KEYS):
        assert tier.put(key, StoredChunk(make_kv(number), time.time()))
    tier.calls = 0
    return tier


def request(store):
    """What a request does: is it worth it, prefetch, fetch."""
    store.contains_many(KEYS)
    with store.fetch(KEYS) as source:
        return taken(source)


def recovered(tier, ticks):
    """Let time pass until the tier is tried, and let the trial end."""
    ticks.now += MOST_SECONDS + 1
    tier.contains(KEYS[0])
    return until(lambda: not tier.guard.reading.is_out)


@pytest.mark.parametrize(
    ("takes", "fails_whole"),
    [(2.0, False), (0.0, True), (2.0, True)],
    ids=["slow disk", "network, refused", "network, timeouts"],
)
def test_a_dead_tier_is_asked_once_and_comes_back_by_itself(ticks, takes, fails_whole):
    tier = filled(Dead(ticks, takes=takes, fails_whole=fails_whole))
    with TieredKVStore([HostTier(0, name="host"), tier]) as store:
        assert {lookup.tier for lookup in request(store)} == {"far"}
        tier.failure, tier.calls = OSError("no route to host"), 0
        for _ in range(3):
            found = request(store)
            assert {(one.kv, one.reason, one.tier) for one in found} == {
                (None, "store error", "far")
            }
        assert tier.calls == 1, "of 3 x 16 questions"
        stats = store.stats()["far"]
        assert stats["errors"] == 1
        assert stats["skipped"] >= 3 * len(KEYS)
        tier.failure = None
        assert recovered(tier, ticks)
        assert {lookup.tier for lookup in request(store)} == {"far"}
        assert store.get(make_key(99)).reason == "not stored"


def test_what_fails_at_once_on_a_disk_is_about_one_chunk(ticks):
    tier = filled(Dead(ticks, takes=0.01))
    tier.failure = OSError("is a directory")
    for key in KEYS:
        assert str(tier.get(key)) == f"far tier: could not read {key}: is a directory"
    assert tier.calls == len(KEYS)
    assert tier.is_failing
    tier.failure = None
    assert same(tier.get(KEYS[0]).kv, make_kv(0))
    assert not tier.is_failing


def test_an_answer_later_than_the_timeout_is_taken_and_is_a_failure(ticks):
    tier = filled(Dead(ticks, policy=TierPolicy(timeout_seconds=1)))
    tier.stalls = 1.5
    with TieredKVStore([tier]) as store:
        assert store.get(KEYS[0]).tier == "far"
        assert store.get(KEYS[1]).reason == "store error"
        tier.stalls = 0.0
        assert recovered(tier, ticks)
        assert store.get(KEYS[1]).tier == "far"


def test_a_tier_that_finds_no_memory_is_not_out(ticks):
    tier = filled(Dead(ticks, fails_whole=True))
    with TieredKVStore([tier]) as store:
        tier.failure = MemoryError()
        assert {lookup.reason for lookup in request(store)} == {"no room"}
        tier.failure = None
        assert [lookup.reason for lookup in request(store)][:7] == [None] * 7


@pytest.mark.parametrize("failure", [RuntimeError("broken pipe"), KeyError("x"), ValueError("y")])
def test_whatever_a_tier_raises_no_request_fails(ticks, failure, tmp_path):
    for whole in (False, True):
        tier = filled(Dead(ticks, fails_whole=whole))
        disk = DiskTier(tmp_path / str(whole))
        disk.put(KEYS[7], StoredChunk(make_kv(7), time.time()))
        with TieredKVStore([tier, disk]) as store:
            tier.failure = failure
            found = request(store)
            assert [lookup.reason for lookup in found] == ["store error"] * 7 + [None]
            assert [lookup.tier for lookup in found] == ["far"] * 7 + ["disk"]
            store.prefetch(KEYS)
            assert store.put(KEYS[0], make_kv(0)), "the disk took it"
            assert store.contains(KEYS[0])
            assert store.evict(KEYS[0])
            assert store.stats()["far"]["errors"] > 0
            assert type(failure).__name__ in str(tier_error(tier, ticks))


def tier_error(tier, ticks):
    """What reading the tier returns once it is asked again."""
    tier.guard.reading = Breaker(ticks)
    return tier.get(KEYS[0])


# The breaker by itself


def test_the_time_out_doubles_up_to_a_minute_and_starts_over_after_success(ticks):
    breaker, waits = Breaker(ticks), []
    breaker.failed(breaker.ask())
    for _ in range(9):
        began = ticks.now
        while (permit := breaker.ask_for_trial()) is None:
            ticks.now += 0.25
        waits.append(ticks.now - began)
        assert breaker.ask() is None
        assert breaker.ask_for_trial() is None, "one trial at a time"
        breaker.failed(permit)
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    ticks.now += MOST_SECONDS
    breaker.succeeded(breaker.ask_for_trial())
    assert not breaker.is_out
    breaker.failed(breaker.ask())
    ticks.now += FIRST_SECONDS
    assert breaker.ask_for_trial() is not None
