"""What is loaded, computed and recomputed, against times worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cacheblend_rag import BlendConfig
from cacheblend_rag.blend.cost import LayerCost, prefill_cost
from cacheblend_rag.kv.timings import LEAST, Speeds
from cacheblend_rag.prefill import policy
from cacheblend_rag.prefill.policy import (
    MARGIN,  # as it is shipped: tests/conftest.py changes it when tests begin
    Controller,
    Rates,
    StoredPart,
)

LAYERS, TOKENS = 10, 1000
COSTS = (LayerCost(per_row=1e6, per_row_probe=2e5, per_pair=10.0),) * LAYERS
FULL = prefill_cost(COSTS, TOKENS)
PARTS = [StoredPart(start, start + 200, "disk", 1000) for start in (50, 250, 450, 650)]
PLAIN = BlendConfig(recompute_ratio=0.15)


@pytest.fixture(autouse=True)
def _times_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decisions are made as users' are."""
    monkeypatch.setattr(policy, "MARGIN", MARGIN)


class Clock:
    """Says the time that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def controller(
    *,
    prefill: float | None = 1.0,
    blend: float | None = 1.0,
    clock: Clock | None = None,
    times: int = LEAST,
    **loading: float,
) -> Controller:
    """prefill: seconds of a whole prompt; blend: as many for the same work; loading: of 1000 bytes
    of each tier. times: how often each was measured."""
    clock = clock or Clock()
    rates, speeds = Rates(clock), Speeds(clock)
    for _ in range(times):
        if prefill is not None:
            rates.record("prefill", FULL, prefill)
        if blend is not None:
            rates.record("blend", FULL, blend)
        for tier, seconds in loading.items():
            speeds.record(tier, 1000, seconds)
    return Controller(COSTS, rates, speeds)


def test_what_was_never_measured_is_tried() -> None:
    for unknown in (controller(prefill=None), controller(blend=None, disk=50.0), controller()):
        decision = unknown.decide(TOKENS, PARTS, PLAIN)
        assert decision.load == tuple(PARTS)
        assert decision.why is None
    assert controller(prefill=None, disk=1.0).decide(TOKENS, PARTS, PLAIN).load == ()


def test_what_loads_slower_than_it_computes_is_computed() -> None:
    parts = [*PARTS[:2], *(replace(part, tier="s3") for part in PARTS[2:])]
    decision = controller(disk=0.01, s3=0.6).decide(TOKENS, parts, PLAIN)
    assert decision.load == tuple(parts[:2])
    assert decision.why == "2 of 4 stored chunks are computed sooner than loaded"
    assert controller(disk=0.01, s3=0.1).decide(TOKENS, parts, PLAIN).load == tuple(parts)
    slower = controller(disk=0.6, s3=0.01).decide(TOKENS, parts, PLAIN)
    assert slower.load == tuple(parts[2:])


def test_below_break_even_it_is_ordinary_prefill() -> None:
    decision = controller(disk=0.5).decide(TOKENS, PARTS, PLAIN)
    assert decision.load == ()
    assert decision.why == "ordinary prefill takes 1,000 ms, blending would take 2,200 ms"
    slow_rows = controller(blend=20.0, disk=0.01).decide(TOKENS, PARTS, PLAIN)
    assert slow_rows.load == ()


def test_one_bad_measurement_never_decides() -> None:
    """A neighbour's load made one pass take 20 s, where those like it took 4 to 10."""
    parts = [*PARTS[:2], *(replace(part, tier="s3") for part in PARTS[2:])]
    for before in (2, 3, 4, 10):
        for sizes in ((1.0,), (1.0, 2.0, 3.0)):
            made = controller(prefill=6.0, blend=None, times=5)
            for number in range(before):
                size = sizes[number % len(sizes)]
                made.rates.record("blend", size * FULL, size * (4.0 + number % 3))
                made.speeds.record("disk", int(size * 1000), size * 0.1)
                made.speeds.record("s3", int(size * 1000), size * 0.1)
            made.rates.record("blend", 2 * FULL, 2 * 20.936)
            made.speeds.record("s3", 2000, 60.0)
            decision = made.decide(TOKENS, parts, PLAIN)
            assert (decision.load, decision.why) == (tuple(parts), None)


def test_without_the_cost_model_whatever_is_stored_is_blended() -> None:
    slow = controller(prefill=1.0, blend=1.0, disk=50.0)
    assert slow.decide(TOKENS, PARTS, PLAIN).load == ()
    decision = slow.decide(TOKENS, PARTS, PLAIN.with_changes(cost_model=False))
    assert (decision.load, decision.why) == (tuple(PARTS), None)
