"""A trace is what the selectors computed, on the rows that they were asked about; bounded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cacheblend_rag import BlendConfig
from cacheblend_rag.blend import passes, plan_schedule
from cacheblend_rag.blend.observer import Observer, Selection
from cacheblend_rag.blend.passes import Candidates
from cacheblend_rag.blend.rows import Rows
from cacheblend_rag.blend.selectors import SELECTORS, Evidence
from cacheblend_rag.blend.selectors.hkvd import HKVD
from cacheblend_rag.prefill import trace_recorder
from cacheblend_rag.prefill.prompt_pass import FusedPrompt
from cacheblend_rag.prefill.trace_recorder import TraceRecorder
from cacheblend_rag.trace import Trace
from tests.blend.fake_stack import LAYERS, FakeStack
from tests.blend.test_passes import Case, Prompt, Slow
from tests.prefill.prompts import (
    filled,
    finished,
    placed,
    prompt_pass,
    traces_alone_and_of_ranks,
)

CHECKS: tuple[dict[str, Any], ...] = (
    {"selector": "hkvd", "check_layers": (1,)},
    {"selector": "hkvd", "selector_options": {"deviation": "k"}, "check_layers": (2,)},
    {"selector": "hkvd", "check_layers": (LAYERS - 1,)},
    {"selector": "hkvd", "check_layers": (1, 3), "recompute_ratios": (0.6, 0.25)},
)
BEFORE: tuple[dict[str, Any], ...] = tuple(
    {"selector": name} for name, kind in SELECTORS.items() if not kind.needs_fresh_kv
)


def traced(prompt: Prompt, config: BlendConfig, **options: Any) -> tuple[Trace, Slow]:
    recorder = recorder_of(prompt.candidates, config)
    case = Case.of(prompt, config, observers=[recorder], **options)
    return recorder.trace(), Slow(case)


def recorder_of(known: Candidates, config: BlendConfig | None = None) -> TraceRecorder:
    schedule = plan_schedule(config or BlendConfig(), LAYERS)
    return TraceRecorder(FakeStack(), known, schedule, known.cached.numpy())


def all_cached(tokens: int) -> Candidates:
    known = Candidates.none(tokens)
    known.cached = known.eligible = torch.ones(tokens, dtype=torch.bool)
    return known


@pytest.mark.parametrize("settings", [*CHECKS, *BEFORE], ids=str)
@pytest.mark.parametrize("prompt", [Prompt(), Prompt(hits="ac", protected="c")], ids=str)
@pytest.mark.parametrize("options", [{}, {"row_block": 4, "needs_hidden": False}], ids=str)
def test_a_trace_is_what_the_selector_was_asked_and_said(
    prompt: Prompt,
    settings: dict[str, Any],
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = BlendConfig(**{"recompute_ratio": 0.3, **settings})
    said: list[Tensor] = []
    kind = SELECTORS[config.selector]
    score = kind.score

    def noted(self: Any, evidence: Evidence) -> Tensor:
        said.append(score(self, evidence))
        return said[-1]

    monkeypatch.setattr(kind, "score", noted)
    trace, slow = traced(prompt, config, **options)
    cached = prompt.candidates.cached.tolist()
    rows = [slow.probed.get(layer, rows) for layer, rows in enumerate(slow.rows)]
    assert list(trace.rows) == [sum(cached[i] for i in layer) for layer in rows]
    chooses = kind.fixed_ratio is None
    expected = (list(config.check_layers) if kind.needs_fresh_kv else [None]) if chooses else []
    assert [one.layer for one in trace.selections] == expected
    for one, scores in zip(trace.selections, said, strict=False):
        finite = scores[scores.isfinite()]
        assert list(one.scores) == finite.tolist()
        after = set(slow.rows[one.layer or 0])
        among = sorted(slow.eligible - slow.always)
        if one.layer is not None:
            among = sorted(set(slow.probed[one.layer]) & set(among))
        assert [i for i, kept in zip(among, scores.isfinite(), strict=True) if kept] == list(
            one.positions
        )
        assert list(one.chosen) == [i in after for i in one.positions]
        assert len(one.key_deviations) == (len(one.positions) if one.layer is not None else 0)
    for one in trace.selections:
        if config.selector == "hkvd":
            by = HKVD(**config.selector_options).deviation
            deviations = one.value_deviations if by == "v" else one.key_deviations
            assert deviations == one.scores
            assert one.key_deviations != one.value_deviations
    assert not trace.truncated


def test_a_pass_hands_its_trace_back_only_where_it_is_asked_for() -> None:
    options: dict[str, Any] = {"selector": "hkvd", "recompute_ratio": 0.3}
    assert finished(prompt_pass(filled(placed()), placed(), **options)).trace is None
    done = finished(prompt_pass(filled(placed()), placed(), trace=True, **options))
    assert done.trace is not None
    (selection,) = done.trace.selections
    chosen = [i for i, kept in zip(selection.positions, selection.chosen, strict=True) if kept]
    told = {
        i
        for report in done.chunks
        for i in range(report.start, report.start + report.tokens)
        if i in chosen
    }
    assert len(told) == len(chosen) == sum(report.recomputed for report in done.chunks)


def test_without_an_observer_nothing_is_computed_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def called(*_: object) -> None:
        raise AssertionError("a deviation was computed for nobody")

    monkeypatch.setattr(passes, "deviations_of", called)
    monkeypatch.setattr(passes, "Selection", called)
    Case.of(Prompt(), BlendConfig(selector="hkvd"))
    with pytest.raises(AssertionError):
        Case.of(Prompt(), BlendConfig(selector="hkvd"), observers=[Observer()])


def test_an_observer_of_ones_own_sees_the_pass_beside_the_trace() -> None:
    seen: list[Selection] = []

    class Watching(Observer):
        def selected(self, selection: Selection) -> None:
            seen.append(selection)

    work = prompt_pass(filled(placed()), placed(), selector="hkvd", recompute_ratio=0.3, trace=True)
    work.observer = Watching()
    done = finished(work)
    assert isinstance(done, FusedPrompt)
    assert done.trace is not None
    assert [one.positions.tolist() for one in seen] == [
        list(one.positions) for one in done.trace.selections
    ]


def selection(scores: Tensor, chosen: int = 2) -> Selection:
    positions = torch.arange(0, 2 * len(scores), 2).numpy()
    best = positions[scores.argsort(descending=True)[:chosen].sort().values.numpy()]
    return Selection(None, positions, scores, best)


def test_of_a_long_selection_the_highest_scores_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_recorder, "MOST_TOKENS", 3)
    recorder = recorder_of(all_cached(12))
    recorder.selected(selection(torch.tensor([0.1, 0.5, 0.3, 0.2, 0.9])))
    (one,) = recorder.trace().selections
    assert (one.positions, one.chosen) == ((2, 4, 8), (True, False, True))
    assert one.scores == pytest.approx((0.5, 0.3, 0.9))
    assert recorder.trace().truncated


def test_what_has_no_score_is_left_out_and_many_selections_are_cut() -> None:
    recorder = recorder_of(all_cached(12))
    odd = selection(torch.tensor([0.1, -torch.inf, torch.nan, 0.2]), chosen=1)
    for _ in range(trace_recorder.MOST_SELECTIONS):
        recorder.selected(odd)
    assert not recorder.trace().truncated
    recorder.selected(odd)
    trace = recorder.trace()
    assert trace.truncated
    assert {one.positions for one in trace.selections} == {(0, 6)}
    assert len(trace.selections) == trace_recorder.MOST_SELECTIONS


def test_overflown_deviations_are_the_largest_number() -> None:
    recorder = recorder_of(all_cached(4))
    scores = torch.tensor([1.0, 2.0])
    most = torch.finfo(torch.float32).max
    odd = torch.tensor([torch.inf, torch.nan])
    positions = torch.arange(2).numpy()
    recorder.selected(Selection(1, positions, scores, positions[:1], odd, scores))
    (one,) = recorder.trace().selections
    assert one.key_deviations == (most, most)


def test_rows_are_counted_in_no_more_layers_than_a_trace_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trace_recorder, "MOST_LAYERS", 2)
    known = Candidates.none(3)
    known.cached = known.eligible = torch.tensor([True, False, True])
    recorder = recorder_of(known)
    rows = Rows.where(torch.tensor([True, True, False]).numpy(), torch.device("cpu"))
    for layer in range(3):
        recorder.computed(layer, rows)
    trace = recorder.trace()
    assert (trace.rows, trace.truncated) == ((1, 1), True)


def test_ranks_trace_the_same_with_the_deviations_of_all_heads() -> None:
    alone, first = traces_alone_and_of_ranks(selector="hkvd", recompute_ratio=0.3)
    (one,), (both,) = alone.selections, first.selections
    assert (one.positions, one.chosen) == (both.positions, both.chosen)
    for part in ("scores", "key_deviations", "value_deviations"):
        assert getattr(both, part) == pytest.approx([2 * value for value in getattr(one, part)])
