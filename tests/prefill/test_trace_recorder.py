"""A trace is what the selectors computed, on the rows that they were asked about; bounded."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cacheblend_rag import BlendConfig
from cacheblend_rag.blend import plan_schedule
from cacheblend_rag.blend.observer import Selection
from cacheblend_rag.blend.passes import Candidates
from cacheblend_rag.blend.selectors import Evidence
from cacheblend_rag.prefill import trace_recorder
from cacheblend_rag.prefill.trace_recorder import TraceRecorder
from tests.blend.fake_stack import LAYERS, FakeStack
from tests.prefill.prompts import traces_alone_and_of_ranks

NOTHING = Evidence(torch.zeros(0))


def recorder_of(known: Candidates) -> TraceRecorder:
    schedule = plan_schedule(BlendConfig(), LAYERS)
    return TraceRecorder(FakeStack(), known, schedule, known.cached.numpy())


def all_cached(tokens: int) -> Candidates:
    known = Candidates.none(tokens)
    known.cached = known.eligible = torch.ones(tokens, dtype=torch.bool)
    return known


def selection(scores: Tensor, chosen: int = 2) -> Selection:
    positions = torch.arange(0, 2 * len(scores), 2).numpy()
    best = positions[scores.argsort(descending=True)[:chosen].sort().values.numpy()]
    return Selection(None, positions, NOTHING, scores, best)


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


def test_ranks_trace_the_same_with_the_deviations_of_all_heads() -> None:
    alone, first = traces_alone_and_of_ranks(selector="hkvd", recompute_ratio=0.3)
    (one,), (both,) = alone.selections, first.selections
    assert (one.positions, one.chosen) == (both.positions, both.chosen)
    for part in ("scores", "key_deviations", "value_deviations"):
        assert getattr(both, part) == pytest.approx([2 * value for value in getattr(one, part)])
