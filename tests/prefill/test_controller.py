"""What is loaded, computed and recomputed, against times worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cacheblend_rag import BlendConfig
from cacheblend_rag.blend.cost import Forecast, LayerCost, prefill_cost
from cacheblend_rag.blend.schedule import plan_schedule
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.kv.timings import LEAST, Speeds
from cacheblend_rag.prefill import policy
from cacheblend_rag.prefill.policy import (
    KEEP_SECONDS,
    MARGIN,  # as it is shipped: tests/conftest.py changes it when tests begin
    Controller,
    Rates,
    StoredPart,
    masks_of,
)

LAYERS, TOKENS = 10, 1000
COSTS = (LayerCost(per_row=1e6, per_row_probe=2e5, per_pair=10.0),) * LAYERS
FULL = prefill_cost(COSTS, TOKENS)
PARTS = [StoredPart(start, start + 200, "disk", 1000) for start in (50, 250, 450, 650)]
AUTO = BlendConfig(recompute_ratio="auto", selector="prior", ratio_bounds=(0.1, 0.5))
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


def computing(ratio: float, parts: list[StoredPart] = PARTS) -> float:
    """Seconds of a pass, where a whole prompt takes one."""
    config = AUTO.with_ratio(ratio)
    masks = masks_of(TOKENS, parts)
    return Forecast(COSTS, *masks).work(plan_schedule(config, LAYERS)) / FULL


def test_what_was_never_measured_is_tried() -> None:
    for unknown in (controller(prefill=None), controller(blend=None, disk=50.0), controller()):
        decision = unknown.decide(TOKENS, PARTS, PLAIN)
        assert decision.load == tuple(PARTS)
        assert decision.config == PLAIN
        assert decision.why is None
    assert controller(prefill=None, disk=1.0).decide(TOKENS, PARTS, PLAIN).load == ()
    unmeasured = controller(blend=None).decide(TOKENS, PARTS, AUTO)
    assert unmeasured.config.recompute_ratio == 0.1
    assert unmeasured.why == "ratio 0.1: nothing is measured yet"
    narrow = AUTO.with_changes(ratio_bounds=(0.3, 0.5))
    assert controller(blend=None).decide(TOKENS, PARTS, narrow).config.recompute_ratio == 0.3


@pytest.mark.parametrize("hidden", [0.2, 0.3, 0.43])
def test_auto_is_the_largest_ratio_whose_recompute_hides(hidden: float) -> None:
    loading = computing(hidden) + 1e-6
    decision = controller(disk=loading / len(PARTS)).decide(TOKENS, PARTS, AUTO)
    chosen = decision.config.recompute_ratio
    assert isinstance(chosen, float)
    assert hidden - 0.021 <= chosen <= hidden
    assert computing(chosen) <= loading < computing(chosen + 0.02)
    assert decision.why == (
        f"ratio {chosen:g}: computing {1000 * computing(chosen):.0f} ms, "
        f"loading {1000 * loading:.0f} ms"
    )
    assert decision.load == tuple(PARTS)


def test_auto_keeps_within_its_bounds() -> None:
    assert controller(disk=0.0).decide(TOKENS, PARTS, AUTO).config.recompute_ratio == 0.1
    assert controller(disk=0.2).decide(TOKENS, PARTS, AUTO).config.recompute_ratio == 0.5


def test_what_loads_slower_than_it_computes_is_computed() -> None:
    parts = [*PARTS[:2], *(replace(part, tier="s3") for part in PARTS[2:])]
    decision = controller(disk=0.01, s3=0.6).decide(TOKENS, parts, PLAIN)
    assert decision.load == tuple(parts[:2])
    assert decision.why == "2 of 4 stored chunks are computed sooner than loaded"
    assert controller(disk=0.01, s3=0.1).decide(TOKENS, parts, PLAIN).load == tuple(parts)
    slower = controller(disk=0.6, s3=0.01).decide(TOKENS, parts, PLAIN)
    assert slower.load == tuple(parts[2:])


def test_blocks_of_a_prefix_are_no_chunks() -> None:
    block = StoredPart(0, 50, "s3", 1000, 50, is_chunk=False)
    slow = [replace(part, tier="s3") for part in PARTS[2:]]
    made = controller(disk=0.01, s3=0.6)
    some = made.decide(TOKENS, [block, *PARTS[:2], *slow], PLAIN)
    assert some.load == tuple(PARTS[:2])
    assert some.why == "2 of 4 stored chunks are computed sooner than loaded"
    every = made.decide(TOKENS, [block, *PARTS], PLAIN)
    assert (every.load, every.why) == (tuple(PARTS), None)


def test_a_held_prefix_is_computed_neither_way() -> None:
    """Half of the prompt is held: what is left takes ordinary prefill little more than half."""
    parts = [StoredPart(650, 700, "disk", 550)]
    made, unasked = controller(disk=1.0), PLAIN.with_changes(selector="prior")
    assert made.decide(TOKENS, parts, unasked).load == tuple(parts)
    assert made.decide(TOKENS, parts, PLAIN).load == ()  # the probe computes most of it twice
    behind = made.decide(TOKENS, parts, unasked, held=500)
    assert behind.load == ()
    assert behind.why == "ordinary prefill takes 501 ms, blending would take 605 ms"


def test_below_break_even_it_is_ordinary_prefill() -> None:
    decision = controller(disk=0.5).decide(TOKENS, PARTS, PLAIN)
    assert decision.load == ()
    assert decision.why == "ordinary prefill takes 1,000 ms, blending would take 2,200 ms"
    slow_rows = controller(blend=20.0, disk=0.01).decide(TOKENS, PARTS, PLAIN)
    assert slow_rows.load == ()


@pytest.mark.parametrize("times", [1, 2])
def test_few_measurements_decide_nothing(times: int) -> None:
    for slow in (controller(disk=50.0, times=times), controller(blend=50.0, times=times)):
        decision = slow.decide(TOKENS, PARTS, PLAIN)
        assert (decision.load, decision.why) == (tuple(PARTS), None)
    unmeasured = controller(times=times, disk=50.0).decide(TOKENS, PARTS, AUTO)
    assert unmeasured.why == "ratio 0.1: nothing is measured yet"


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


def test_old_measurements_of_passes_are_forgotten() -> None:
    clock = Clock()
    made = controller(prefill=1.0, blend=20.0, clock=clock)
    clock.now += 1
    assert made.decide(TOKENS, PARTS, PLAIN).load == ()
    clock.now += KEEP_SECONDS
    decision = made.decide(TOKENS, PARTS, PLAIN)
    assert (decision.load, decision.why) == (tuple(PARTS), None)


def test_without_the_cost_model_whatever_is_stored_is_blended() -> None:
    slow = controller(prefill=1.0, blend=1.0, disk=50.0)
    assert slow.decide(TOKENS, PARTS, PLAIN).load == ()
    decision = slow.decide(TOKENS, PARTS, PLAIN.with_changes(cost_model=False))
    assert (decision.load, decision.why) == (tuple(PARTS), None)
    assert decision.config.recompute_ratio == PLAIN.recompute_ratio
    auto = slow.decide(TOKENS, PARTS, AUTO.with_changes(cost_model=False))
    assert auto.load == tuple(PARTS)
    assert auto.config.recompute_ratio == 0.5
    assert (auto.why or "").startswith("ratio 0.5: computing")


def test_a_slow_tier_is_given_another_try() -> None:
    now = [0.0]
    speeds = Speeds(lambda: now[0])
    for _ in range(LEAST):
        speeds.record("disk", 1000, 0.5)
    made = replace(controller(), speeds=speeds)
    assert made.decide(TOKENS, PARTS, PLAIN).load == ()
    now[0] = 61.0
    assert made.decide(TOKENS, PARTS, PLAIN).load == tuple(PARTS)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (
            {"recompute_ratio": "most"},
            "recompute_ratio='most' must be a valid number or a valid tuple or 'auto'",
        ),
        ({"ratio_bounds": (0.3, 0.1)}, "must be the smaller ratio, then"),
        ({"ratio_bounds": (0.3, 2)}, r"ratio_bounds=\(0.3, 2\) must be less than or equal to 1"),
        ({"cost_model": "yes"}, "cost_model='yes' must be a valid boolean"),
    ],
)
def test_settings_that_cannot_be_are_refused(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        BlendConfig.of(wrong)
