"""What the base class of all tiers makes of failures: logs that say what, where and why."""

from __future__ import annotations

import errno
import logging

import pytest

from cacheblend_rag.errors import StoreError
from cacheblend_rag.kv import StoredChunk, Tier, TierPolicy, Usage
from cacheblend_rag.kv.reader import WholeReader
from cacheblend_rag.kv.stored_chunk import PutResult
from cacheblend_rag.kv.tiers.policy import COUNTED
from tests.kv.samples import make_key, make_kv

KEY = make_key(0)
CHUNK = StoredChunk(make_kv(), 1.0)


class Plain(Tier):
    """Keeps chunks in a dict, until it is told to fail. unreadable: what reading a chunk raises."""

    def __init__(self, failure=None):
        super().__init__("far", None)
        self.chunks, self.failure, self.unreadable = {}, failure, None

    def _entry(self, key):
        return self.chunks.get(key)

    def entries(self):
        return iter(self.chunks.items())

    def usage(self):
        return Usage(len(self.chunks), 7)

    def _open(self, key):
        self._fail()
        if self.unreadable is not None:
            raise self.unreadable
        chunk = self.chunks.get(key)
        return None if chunk is None else WholeReader(chunk.kv, chunk.written_at)

    def _save(self, key, chunk):
        self._fail()
        self.chunks[key] = chunk

    def _drop(self, key):
        self._fail()
        return self.chunks.pop(key, None) is not None

    def _fail(self):
        if self.failure is not None:
            raise self.failure


def counted(tier):
    """What was counted, zeros left out."""
    stats = tier.stats()
    assert set(stats) == {"entries", "bytes", "capacity_bytes", *COUNTED}
    return {name: stats[name] for name in COUNTED if stats[name]}


@pytest.fixture(autouse=True)
def _all_logs(caplog):
    caplog.set_level(logging.DEBUG, "cacheblend_rag")


def said(caplog):
    found = [(record.levelname, record.getMessage()) for record in caplog.records]
    caplog.clear()
    return found


def test_a_tier_that_fails_says_what_it_could_not_do(caplog):
    tier = Plain(OSError("no such device"))
    assert str(tier.get(KEY)) == f"far tier: could not read {KEY}: no such device"
    assert said(caplog) == [("WARNING", f"far tier: could not read {KEY}: no such device")]
    assert counted(tier) == {"misses": 1, "errors": 1}
    assert not tier.put(KEY, CHUNK)
    assert said(caplog) == [("WARNING", f"far tier: could not store {KEY}: no such device")]
    assert not tier.evict(KEY)
    assert said(caplog) == [("WARNING", f"far tier: could not remove {KEY}: no such device")]
    assert not tier.evict(KEY, "expired")
    said(caplog)
    tier.quarantine(KEY, "it smells")
    assert said(caplog) == [
        ("WARNING", f"far tier: {KEY} quarantined: it smells"),
        ("WARNING", f"far tier: could not set {KEY} aside: no such device"),
    ]
    assert counted(tier) == {"misses": 1, "errors": 5, "quarantined": 1}


def test_one_cause_is_one_warning_until_an_access_succeeds(caplog):
    """A full disk fails each chunk; the file's name in the error is no other cause."""
    tier = Plain()

    def put(number, failure):
        tier.failure = failure
        return tier.put(make_key(number), CHUNK)

    full = [OSError(errno.ENOSPC, "No space left on device", f"file {n}") for n in range(4)]
    results = [put(number, full[number]) for number in range(3)]
    assert {result.failure for result in results} == {"far tier: No space left on device"}
    assert [level for level, _ in said(caplog)] == ["WARNING", "DEBUG", "DEBUG"]
    put(0, OSError("another cause"))
    assert [level for level, _ in said(caplog)] == ["WARNING"]
    assert put(0, None)
    put(3, full[3])
    assert [level for level, _ in said(caplog)] == ["WARNING"], "it is full again"


@pytest.mark.parametrize(
    ("memory", "lasting", "stored", "refusal"),
    [
        (True, [True], True, None),
        (True, ["disk: full"], True, "disk: full"),
        (False, ["disk: full"], False, "disk: full"),
        (True, ["disk: full", True], True, None),
        (True, ["disk: full", "redis: gone"], True, "disk: full; redis: gone"),
        (False, [False], False, "store full"),
        (True, [False], True, None),
        (True, [], True, None),
        ("memory: broken", [], False, "memory: broken"),
    ],
)
def test_what_lasts_decides_whether_a_chunk_is_stored(memory, lasting, stored, refusal):
    """Memory that took a chunk does not make up for a disk that failed to."""
    of_tiers = [(False, memory), *((True, one) for one in lasting)]
    results = [(d, PutResult(r is True, r if isinstance(r, str) else "")) for d, r in of_tiers]
    put = PutResult.of_tiers(results)
    assert (put.stored, bool(put), put.refusal) == (stored, stored, refusal)


# Policies


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"capacity_bytes": -1}, "capacity_bytes=-1 must be at least 0"),
        ({"ttl_seconds": 0}, "ttl_seconds=0 must be above 0"),
        ({"timeout_seconds": -2}, "timeout_seconds=-2 must be above 0"),
        ({"ttl_seconds": float("nan")}, "ttl_seconds=nan must be above 0"),
        ({"admit": "lru"}, "admit='lru' must be one of frequency, always"),
    ],
)
def test_what_is_out_of_range_is_named(options, message):
    with pytest.raises(StoreError, match=f"^{message}$"):
        TierPolicy(**options)
