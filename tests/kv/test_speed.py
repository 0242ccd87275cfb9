"""What is known of tiers' speeds, from reads of which the truth is known."""

import pytest

from cacheblend_rag.kv.timings import STALE_SECONDS, Speeds

GIB = 1 << 30


def took(nbytes, *, latency=0.02, bytes_per_second=GIB):
    return latency + nbytes / bytes_per_second


def test_latency_and_bandwidth_are_told_apart_by_reads_of_several_sizes():
    speeds = Speeds()
    for nbytes in (1 << 20, 1 << 24, 1 << 22, 1 << 26, 1 << 21):
        speeds.record("disk", nbytes, took(nbytes))
    found = speeds.of("disk")
    assert found.latency == pytest.approx(0.02, rel=1e-3)
    assert found.units_per_second == pytest.approx(GIB, rel=1e-3)
    assert found.seconds(1 << 28) == pytest.approx(took(1 << 28), rel=1e-3)


@pytest.mark.parametrize(
    ("reads", "small", "large"),
    [([(1000, 1.0), (100_000, 0.5)], 1000, 100_000), ([(1000, 0.001), (2000, 10.0)], 1, 1000)],
    ids=["more bytes took less time", "few bytes would take less than none"],
)
def test_no_fit_says_what_cannot_be(reads, small, large):
    speeds = Speeds()
    for nbytes, seconds in reads:
        speeds.record("disk", nbytes, seconds)
    assert speeds.of("disk").latency == 0
    assert 0 < speeds.of("disk").seconds(small) < speeds.of("disk").seconds(large)


def test_what_was_measured_long_ago_is_not_known_any_more():
    now = [0.0]
    speeds = Speeds(lambda: now[0])
    assert speeds.of("s3") is None
    speeds.record("s3", 1000, 1.0)
    speeds.record("disk", 0, 1.0)
    now[0] = STALE_SECONDS
    assert speeds.of("s3") is not None
    assert speeds.of("disk") is None
    now[0] += 1
    assert speeds.of("s3") is None
    speeds.record("s3", 1000, 1.0)
    assert speeds.of("s3") is not None
