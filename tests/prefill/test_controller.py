"""What is loaded, computed and recomputed, against times worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cacheblend_rag import BlendConfig
from cacheblend_rag.blend.cost import LayerCost, prefill_cost
from cacheblend_rag.blend.forecast import Forecast
from cacheblend_rag.blend.schedule import plan_schedule
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.kv.speed import Speeds
from cacheblend_rag.prefill import controller as controller_module
from cacheblend_rag.prefill.controller import (
    WORTH_SECONDS,  # as it is shipped: tests/conftest.py changes it when tests begin
    Controller,
    Rates,
    StoredPart,
    _masks,
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
    monkeypatch.setattr(controller_module, "WORTH_SECONDS", WORTH_SECONDS)


def controller(
    *, prefill: float | None = 1.0, blend: float | None = 1.0, **loading: float
) -> Controller:
    """prefill: seconds of a whole prompt; blend: as many for the same work; loading: of 1000 bytes
    of each tier."""
    rates, speeds = Rates(), Speeds()
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
    masks = _masks(TOKENS, parts, config)
    return Forecast(COSTS, *masks).work(plan_schedule(config, LAYERS)) / FULL


def test_what_was_never_measured_is_tried() -> None:
    for unknown in (controller(prefill=None), controller(blend=None, disk=50.0), controller()):
        decision = unknown.decide(TOKENS, PARTS, PLAIN)
        assert decision.load == tuple(PARTS)
        assert decision.config == PLAIN
        assert decision.why is None
    unmeasured = controller(blend=None).decide(TOKENS, PARTS, AUTO)
    assert unmeasured.config.recompute_ratio == 0.16
    assert unmeasured.why == "ratio 0.16: nothing is measured yet"
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


def test_below_break_even_it_is_ordinary_prefill() -> None:
    decision = controller(disk=0.5).decide(TOKENS, PARTS, PLAIN)
    assert decision.load == ()
    assert decision.why == "ordinary prefill takes 1,000 ms, blending would take 2,200 ms"
    slow_rows = controller(blend=20.0, disk=0.01).decide(TOKENS, PARTS, PLAIN)
    assert slow_rows.load == ()


def test_so_short_a_prefill_is_not_argued_about() -> None:
    decision = controller(prefill=0.05, blend=0.05, disk=0.5).decide(TOKENS, PARTS, PLAIN)
    assert decision.load == tuple(PARTS)
    assert decision.why is None


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
    speeds.record("disk", 1000, 0.5)
    made = replace(controller(), speeds=speeds)
    assert made.decide(TOKENS, PARTS, PLAIN).load == ()
    now[0] = 61.0
    assert made.decide(TOKENS, PARTS, PLAIN).load == tuple(PARTS)


def test_protected_parts_are_not_recomputed() -> None:
    protected = [replace(part, protected=True) for part in PARTS]
    cached, eligible = _masks(TOKENS, protected, PLAIN)
    assert cached.sum() == 800
    assert not eligible.any()
    assert _masks(TOKENS, protected, PLAIN.with_changes(protect_context=False))[1].sum() == 800


def test_rates_are_of_work_done_lately() -> None:
    rates = Rates()
    assert rates.of("blend") is None
    rates.record("blend", 0.0, 1.0)
    rates.record("blend", 1.0, 0.0)
    assert rates.of("blend") is None
    rates.record("blend", 100.0, 1.0)
    assert rates.of("blend") == 100.0
    assert rates.of("prefill") is None
    for _ in range(20):
        rates.record("blend", 100.0, 10.0)
    assert rates.of("blend") == pytest.approx(10.0, rel=0.05)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"recompute_ratio": "most"}, 'recompute_ratio=.* from 0 to 1 or "auto"'),
        ({"recompute_ratio": "auto", "recompute_ratios": (0.5,)}, "leave recompute_ratios out"),
        ({"ratio_bounds": (0.3, 0.1)}, "two ratios that rise"),
        ({"ratio_bounds": (0.3,)}, "two ratios that rise"),
        ({"ratio_bounds": 0.3}, "must be a list"),
        ({"ratio_bounds": (0.3, 2)}, "ratio_bounds=2 must be a number from 0 to 1"),
        ({"cost_model": "yes"}, "cost_model='yes' must be true or false"),
    ],
)
def test_settings_that_cannot_be_are_refused(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        BlendConfig.from_dict(wrong)


def test_auto_survives_the_wire() -> None:
    again = BlendConfig.from_dict(AUTO.to_dict())
    assert again == AUTO
    assert again.ratio == 0.5
    assert again.with_ratio(0.2).ratio == 0.2
