"""Waits for a layer, shared among the tiers that were waited for."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from cacheblend_rag.kv import layer_wait
from cacheblend_rag.kv.layer_wait import LayerWait, shared
from cacheblend_rag.kv.shared_chunk import Part

READ = Part(0, [])


@pytest.mark.parametrize(
    ("done", "wanted"),
    [
        ({"disk": 14.0}, {"disk": 10.0}),
        ({"host": 10.0, "disk": 18.0}, {"host": 0.0, "disk": 10.0}),
        ({"disk": 14.0, "redis": 18.0}, {"disk": 2.0, "redis": 8.0}),
        ({"host": 10.0, "disk": 10.0}, {"host": 5.0, "disk": 5.0}),
        ({"host": 10.0, "disk": 13.0, "redis": 20.0}, {"host": 0.0, "disk": 1.5, "redis": 8.5}),
        ({}, {}),
    ],
)
def test_a_wait_from_10_to_20_is_shared(done: dict[str, float], wanted: dict[str, float]) -> None:
    assert shared(10.0, 20.0, done) == wanted


def test_reads_are_waited_for_until_the_last_one_of_their_tier(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0
    monkeypatch.setattr(layer_wait.time, "perf_counter", lambda: now)
    early: Future[Part] = Future()
    early.set_result(READ)
    one, other, lost = Future[Part](), Future[Part](), Future[Part]()
    wait = LayerWait([("host", early), ("disk", one), ("disk", other), ("memory", None)])
    given_up = LayerWait([("disk", one), ("redis", lost)])
    now = 2.0
    one.set_result(READ)
    now = 6.0
    other.set_result(READ)
    now = 8.0
    assert wait.seconds() == {"host": 0.0, "disk": 8.0, "memory": 0.0}
    assert wait.seconds(without=1.5) == {"host": 0.0, "disk": 6.5, "memory": 0.0}
    assert given_up.seconds() == {"disk": 1.0, "redis": 7.0}
    now = 5.0  # a reading that was taken before another thread's
    assert wait.seconds() == {"host": 0.0, "disk": 5.0, "memory": 0.0}
