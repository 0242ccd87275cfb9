"""What measurements of work say, however bad one of them is."""

from __future__ import annotations

import random

import pytest

from cacheblend_rag.kv.timings import KEPT, LEAST, Estimate, Timings


def estimate(*measured: tuple[float, float]) -> Estimate:
    timings = Timings(100.0)
    for units, seconds in measured:
        timings.add(units, seconds)
    found = timings.estimate()
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


def test_few_measurements_are_known_to_be_few() -> None:
    assert not estimate((1.0, 1.0), (1.0, 1.0)).is_known
    assert estimate((1.0, 1.0), (1.0, 1.0), (1.0, 1.0)).is_known


def test_the_spread_is_how_far_measurements_lie_from_the_estimate() -> None:
    assert estimate((1.0, 2.0), (2.0, 4.0), (3.0, 6.0)).spread == pytest.approx(0.0)
    assert estimate((1.0, 0.8), (1.0, 1.0), (1.0, 1.3)).spread == pytest.approx(0.2)


def test_sizes_that_are_much_alike_tell_no_fixed_part() -> None:
    measured = [(1000.0 + number, 1.0 - number / 100) for number in range(KEPT)]
    assert estimate(*measured).latency == 0.0


def test_each_measurement_ages_by_itself() -> None:
    now = [0.0]
    timings = Timings(60.0, lambda: now[0])
    timings.add(1.0, 9.0)
    now[0] = 50.0
    timings.add(1.0, 1.0)
    found = timings.estimate()
    assert (found and found.count) == 2
    now[0] = 61.0
    found = timings.estimate()
    assert found == Estimate(0.0, 1.0, 0.0, 1)
    now[0] = 111.0
    assert timings.estimate() is None
