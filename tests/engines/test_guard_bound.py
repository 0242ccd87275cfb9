"""Bounds of a drifting mean, in simulation: few false alarms, real ones within what is said."""

from __future__ import annotations

import numpy as np
import pytest

from cacheblend_rag.engines.guard_bound import DriftingMean, Floats, samples_to_notice
from cacheblend_rag.engines.guard_state import DRIFT, LEAST_EXCESS, bounded
from cacheblend_rag.settings import GuardConfig

CONFIG = GuardConfig()
LIMIT = bounded(CONFIG.limit)
BAD = bounded(DRIFT * CONFIG.limit)
ERROR = CONFIG.error / 2
KINDS = ("few are bad", "as wide as its mean", "half as wide")


def followed(runs: int, error: float = ERROR) -> DriftingMean:
    return DriftingMean(
        error=error, window=CONFIG.window, told=(LIMIT,), low=LEAST_EXCESS, high=1.0, shape=(runs,)
    )


def drawn(draw: np.random.Generator, kind: str, mean: float, runs: int) -> Floats:
    """Samples from 0 to 1 with this mean."""
    if kind == "few are bad":
        return (draw.random(runs) < mean).astype(np.float64)
    shape = 1.0 if kind == "as wide as its mean" else 4.0
    return draw.beta(shape, shape * (1 - mean) / mean, runs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share", [0.8, 1.0])
def test_false_alarms_are_rarer_than_the_error(kind: str, share: float) -> None:
    runs, draw = 2000, np.random.default_rng(1)
    bound = followed(runs)
    for _ in range(500):
        bound.observe(drawn(draw, kind, share * LIMIT, runs))
    assert bound.is_above(LIMIT).mean() < 0.01


@pytest.mark.parametrize("kind", KINDS[1:])
@pytest.mark.parametrize("before", [0, 700])
def test_a_drift_is_noticed_within_what_is_said(kind: str, before: int) -> None:
    runs, draw = 300, np.random.default_rng(2)
    bound = followed(runs)
    for _ in range(before):
        bound.observe(drawn(draw, kind, 0.4 * LIMIT, runs))
    assert not bound.is_above(LIMIT).any()
    said = samples_to_notice(BAD, LIMIT, spread=BAD, error=ERROR, window=CONFIG.window, seen=before)
    for _ in range(said):
        bound.observe(drawn(draw, kind, BAD, runs))
    assert bound.is_above(LIMIT).mean() >= 0.95


def test_what_is_said_is_not_a_guess_at_random() -> None:
    said = [
        samples_to_notice(mean, LIMIT, spread=BAD, error=ERROR, window=512, seen=seen)
        for mean, seen in [(BAD, 0), (2 * BAD, 0), (BAD, 5000)]
    ]
    assert said[1] < said[0] < said[2] < 1000


def test_the_mean_below_is_noticed_too_and_the_order_of_samples_counts() -> None:
    draw = np.random.default_rng(3)
    good = followed(1)
    for _ in range(400):
        good.observe(drawn(draw, KINDS[1], 0.2 * LIMIT, 1))
    assert good.is_below(LIMIT).all()
    assert not good.is_above(LIMIT).any()


def test_bounds_enclose_the_mean_and_narrow() -> None:
    bound = DriftingMean(error=0.01, window=512, told=(0.1,), low=LEAST_EXCESS, high=1.0, grid=100)
    assert (bound.bounds, bound.mean) == ((LEAST_EXCESS, 1.0), 0.0)
    draw, widths = np.random.default_rng(4), []
    for count in range(1, 401):
        bound.observe(float(draw.beta(2, 6)))
        if count % 100 == 0:
            low, high = bound.bounds
            assert low < 0.25 < high
            assert bound.mean == pytest.approx(0.25, abs=0.05)
            widths.append(high - low)
    assert widths == sorted(widths, reverse=True)
    assert widths[-1] < 0.2


def test_old_samples_are_forgotten() -> None:
    bound = DriftingMean(
        error=ERROR, window=CONFIG.window, told=(LIMIT,), low=LEAST_EXCESS, high=1.0
    )
    for _ in range(2 * CONFIG.window):
        bound.observe(0.0)
    for _ in range(CONFIG.window + 1):
        bound.observe(1.0)
    assert bound.mean == 1.0
    assert bound.count == 3 * CONFIG.window + 1
