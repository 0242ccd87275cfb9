"""What a trace says of deviations is what dense layers show, layer by layer."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
from torch import Tensor

from cacheblend_rag import BlendConfig
from cacheblend_rag.blend import plan_schedule
from cacheblend_rag.prefill import trace_recorder
from cacheblend_rag.prefill.trace_recorder import TraceRecorder
from cacheblend_rag.trace import Deviations, Trace
from tests.blend.fake_stack import LAYERS, FakeStack
from tests.blend.test_passes import ENDS, Case, Prompt, Slow

SETTINGS: tuple[dict[str, Any], ...] = (
    {"selector": "hkvd", "check_layers": (1,)},
    {"selector": "hkvd", "check_layers": (1, 3), "recompute_ratios": (0.6, 0.25)},
    {"selector": "random"},
    {"selector": "prior", "recompute_ratio": 1.0},
    {"selector": "none"},
)
PROMPTS = [Prompt(), Prompt(hits="ac", protected="c")]


def traced(
    prompt: Prompt, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, **options: Any
) -> tuple[Trace, Case, Slow]:
    config = BlendConfig(**{"recompute_ratio": 0.3, **settings})
    schedule = plan_schedule(config, LAYERS)
    known = prompt.candidates
    recorder = TraceRecorder(FakeStack(), known, schedule, known.cached.numpy())
    case = Case.of(prompt, config, observers=[recorder], **options)
    return recorder.trace(), case, Slow(case)


def fresh_rows(slow: Slow, layer: int) -> list[int]:
    cached = slow.known.cached.tolist()
    return [row for row in slow.probed.get(layer, slow.rows[layer]) if cached[row]]


def changes(case: Case, slow: Slow, layer: int, kind: str) -> Tensor:
    """(tokens,): squared difference of what is there in the end from what was stored."""
    stored = getattr(case.first, kind)[layer].nan_to_num()
    return (getattr(slow.reference, kind)[layer] - stored).square().sum((0, 2))


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("prompt", PROMPTS, ids=str)
@pytest.mark.parametrize("options", [{}, {"row_block": 4}], ids=str)
def test_each_layer_says_how_far_recomputed_kv_is_from_the_stored(
    prompt: Prompt,
    settings: dict[str, Any],
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trace_recorder, "ROWS_AT_ONCE", 5)
    trace, case, slow = traced(prompt, settings, monkeypatch, **options)
    wanted = [layer for layer in range(LAYERS) if fresh_rows(slow, layer)]
    assert [one.layer for one in trace.layers] == wanted
    for one in trace.layers:
        rows = fresh_rows(slow, one.layer)
        assert one.tokens == len(rows) == trace.rows[one.layer]
        for kind in ("keys", "values"):
            found: Deviations = getattr(one, kind)
            every = changes(case, slow, one.layer, kind)[rows].tolist()
            assert found.mean == pytest.approx(statistics.mean(every), rel=1e-4)
            assert found.median == pytest.approx(statistics.median(every), rel=1e-4)
            assert found.most == pytest.approx(max(every), rel=1e-4)
            there = getattr(slow.reference, kind)[one.layer][:, rows]
            assert found.size == pytest.approx(float(there.square().sum((0, 2)).mean()), rel=1e-4)


@pytest.mark.parametrize("settings", SETTINGS[:4], ids=str)
def test_single_tokens_are_recorded_in_a_few_layers(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    trace, case, slow = traced(Prompt(), settings, monkeypatch)
    assert [one.layer for one in trace.tokens] == [1, 2, 3]
    for one in trace.tokens:
        assert list(one.positions) == fresh_rows(slow, one.layer)
        for kind, found in (("keys", one.key_deviations), ("values", one.value_deviations)):
            wanted = changes(case, slow, one.layer, kind)[list(one.positions)]
            assert list(found) == pytest.approx(wanted.tolist(), rel=1e-4)


def test_of_many_tokens_those_that_changed_most_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_recorder, "MOST_TOKENS", 4)
    trace, case, slow = traced(Prompt(), {"selector": "random"}, monkeypatch)
    assert trace.truncated
    for one in trace.tokens:
        every = changes(case, slow, one.layer, "values")
        order = sorted(fresh_rows(slow, one.layer), key=lambda row: -float(every[row]))
        assert list(one.positions) == sorted(order[:4])


def test_protected_tokens_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    trace, _, slow = traced(Prompt(protected="b"), {"selector": "random"}, monkeypatch)
    start, end = ENDS["between"], ENDS["b"]
    assert trace.protected == tuple(range(start, end))
    assert not slow.eligible & set(trace.protected)
