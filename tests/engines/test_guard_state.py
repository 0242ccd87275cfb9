"""A guard's steps: up, down with hysteresis, stopped; and never where raising is no remedy."""

from __future__ import annotations

import numpy as np
import pytest

from cacheblend_rag.engines.guard import FEWEST, WINDOW, GuardState, Step
from cacheblend_rag.prefill.comparing import Comparison
from cacheblend_rag.settings import GuardConfig

CONFIG = GuardConfig(ratios=(0.1, 0.3, 0.5))
OWN = 0.16


def taken(state: GuardState, blend: float, prefill: float = 0.0, most: int = 2000) -> Step | None:
    """The next step under samples that spread around these divergences; None without one."""
    draw = np.random.default_rng(state.steps)
    for factor in draw.exponential(size=most):
        if step := state.take(Comparison(blend * factor, prefill * factor)):
            return step
    return None


def test_it_falls_only_well_below_the_limit_and_not_at_once() -> None:
    state = GuardState(CONFIG, OWN)
    assert taken(state, 0.4) == "up"
    assert taken(state, 0.7 * CONFIG.limit) is None, "between: it stays"
    state = GuardState(CONFIG, OWN)
    assert taken(state, 0.4) == "up"
    assert taken(state, 0.01, most=WINDOW - 1) is None
    assert taken(state, 0.01) == "down"
    assert state.ratio == 0.0


def test_a_fall_that_failed_is_not_tried_again_soon() -> None:
    state, waits = GuardState(CONFIG, OWN), []
    for _ in range(3):
        assert taken(state, 0.4) == "up"
        found = (state.take(Comparison(0.001)) for _ in range(8 * WINDOW))
        waits.append(next(count for count, step in enumerate(found, start=1) if step == "down"))
    assert waits[0] >= WINDOW
    assert waits[1] >= 2 * WINDOW
    assert waits[2] >= 4 * WINDOW


@pytest.mark.parametrize("seed", range(2))
def test_contextual_kv_that_is_nearer_to_its_documents_is_left_alone(seed: int) -> None:
    """Both diverge by far more than the limit, ordinary prefill by more: it is no remedy."""
    state, draw = GuardState(CONFIG, OWN), np.random.default_rng(seed)
    for blend, prefill in zip(
        draw.exponential(0.4, 1500), draw.exponential(0.8, 1500), strict=True
    ):
        assert state.take(Comparison(blend, prefill)) is None
    assert state.ratio == 0.0
    assert state.mean < 0


def test_a_gross_excess_is_noticed_soon_and_a_small_one_by_the_mean_of_many() -> None:
    gross = GuardState(CONFIG, OWN)
    steps = [gross.take(Comparison(2.0)) for _ in range(30)]
    assert steps.index("up") < 20
    small = GuardState(CONFIG, OWN)
    steps = [small.take(Comparison(1.1 * CONFIG.limit)) for _ in range(FEWEST)]
    assert "up" in steps
    assert steps.index("up") > 0.8 * FEWEST
