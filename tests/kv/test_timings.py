"""What measurements of work and of reads say, however bad one of them is."""

from __future__ import annotations

import random
from concurrent.futures import Future

import pytest

from cacheblend_rag.kv.shared_chunk import Part
from cacheblend_rag.kv.timings import KEPT, LEAST, Estimate, LayerWait, Speeds


def estimate(*measured: tuple[float, float]) -> Estimate:
    speeds = Speeds()
    for units, seconds in measured:
        speeds.record("disk", units, seconds)
    found = speeds.of("disk")
    assert found is not None
    return found


@pytest.mark.parametrize("count", range(LEAST, KEPT + 1))
@pytest.mark.parametrize("bad", [0.001, 1000.0])
@pytest.mark.parametrize("alike", [True, False])
def test_one_bad_measurement_moves_nothing_far(count: int, bad: float, alike: bool) -> None:
    draw = random.Random(count)
    for at in range(count):
        measured = [(1.0 if alike else draw.uniform(1, 10), 0.0) for _ in range(count)]
        measured = [(units, units * draw.uniform(0.95, 1.05)) for units, _ in measured]
        measured[at] = (measured[at][0], measured[at][1] * bad)
        assert 0.5 < estimate(*measured).seconds(5.0) / 5.0 < 2.0


# Tiers


@pytest.mark.parametrize(
    ("reads", "small", "large"),
    [([(1000, 1.0), (100_000, 0.5)], 1000, 100_000), ([(1000, 0.001), (2000, 10.0)], 1, 1000)],
    ids=["more bytes took less time", "few bytes would take less than none"],
)
def test_no_fit_says_what_cannot_be(reads: list[tuple[int, float]], small: int, large: int) -> None:
    speeds = Speeds()
    for nbytes, seconds in reads:
        speeds.record("disk", nbytes, seconds)
    found = speeds.of("disk")
    assert found is not None
    assert found.latency == 0
    assert 0 < found.seconds(small) < found.seconds(large)


def test_a_wait_counts_for_the_tier_that_is_read_last() -> None:
    disk, redis = Future[Part](), Future[Part]()
    wait = LayerWait([("host", None), ("redis", redis), ("disk", disk)])
    for tier, read in (("host", Future[Part]()), ("disk", disk), ("redis", redis)):
        read.cancel()
        seconds = wait.seconds()
        assert [*seconds] == ["host", "redis", "disk"]
        assert seconds[tier] == sum(seconds.values()) > 0
    assert LayerWait([]).seconds() == {}
