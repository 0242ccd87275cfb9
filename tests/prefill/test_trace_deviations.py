"""What a trace says of deviations and attention is what dense layers show, layer by layer."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
import torch
from torch import Tensor

from cacheblend_rag import BlendConfig
from cacheblend_rag.blend import plan_schedule
from cacheblend_rag.prefill import question_follower, trace_recorder
from cacheblend_rag.prefill.rank_correlation import rank_correlation
from cacheblend_rag.prefill.trace_recorder import TraceRecorder
from cacheblend_rag.trace import Deviations, Trace
from tests.blend import test_passes
from tests.blend.fake_stack import LAYERS, FakeStack, Reference
from tests.blend.test_passes import ENDS, TOKENS, Case, Prompt, Slow
from tests.prefill.prompts import (
    SPANS,
    filled,
    finished,
    placed,
    prompt_pass,
    traces_alone_and_of_ranks,
)

SETTINGS: tuple[dict[str, Any], ...] = (
    {"selector": "hkvd", "check_layers": (1,)},
    {"selector": "hkvd", "check_layers": (1, 3), "recompute_ratios": (0.6, 0.25)},
    {"selector": "random"},
    {"selector": "prior", "recompute_ratio": 1.0},
    {"selector": "none"},
)
PROMPTS = [Prompt(), Prompt(hits="ac", protected="c")]


class Noted(Reference):
    """Notes the attention of each layer, (heads, tokens, tokens)."""

    seen: dict[int, Tensor]

    def shares(self, layer: int) -> Tensor:
        found = super().shares(layer)
        self.__dict__.setdefault("seen", {})[layer] = found
        return found


def traced(
    prompt: Prompt, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, **options: Any
) -> tuple[Trace, Case, Slow]:
    config = BlendConfig(**{"recompute_ratio": 0.3, **settings})
    schedule = plan_schedule(config, LAYERS)
    recorder = TraceRecorder(
        FakeStack(), prompt.candidates, schedule, prompt.candidates.cached.numpy(), ENDS["c"]
    )
    case = Case.of(prompt, config, observers=[recorder], **options)
    monkeypatch.setattr(test_passes, "Reference", Noted)
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
            assert (found.by_check is None) == (one.layer <= 1)


@pytest.mark.parametrize("settings", SETTINGS[:4], ids=str)
def test_ranks_are_compared_over_the_tokens_known_at_both(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    trace, case, slow = traced(Prompt(), settings, monkeypatch)
    assert trace.reference == 1
    first = fresh_rows(slow, 1)
    for one in trace.layers:
        rows = [row for row in fresh_rows(slow, one.layer) if row in first]
        for kind in ("keys", "values"):
            found: Deviations = getattr(one, kind)
            now = changes(case, slow, one.layer, kind)
            if one.layer > 1:
                then = changes(case, slow, 1, kind)
                assert found.by_check == pytest.approx(by_hand(now[rows], then[rows]), abs=1e-6)
            if not trace.selections:
                assert found.by_score is None
                continue
            chosen = trace.selections[0]
            scores = dict(zip(chosen.positions, chosen.scores, strict=True))
            both = [row for row in fresh_rows(slow, one.layer) if row in scores]
            theirs = torch.tensor([scores[row] for row in both])
            assert found.by_score == pytest.approx(by_hand(now[both], theirs), abs=1e-6)


def by_hand(ones: Tensor, others: Tensor) -> float:
    """Spearman's correlation by its definition: Pearson's, of ranks that ties share."""
    ranks = [
        torch.tensor([float((each < one).sum()) + (float((each == one).sum()) - 1) / 2
                      for one in each])
        for each in (ones, others)
    ]  # fmt: skip
    return float(torch.corrcoef(torch.stack(ranks))[0, 1])


def test_a_rank_correlation_needs_an_order() -> None:
    assert rank_correlation([1, 2, 3, 4], [10, 20, 30, 1000]) == 1
    assert rank_correlation([1, 2, 3], [3, 2, 1]) == -1
    assert rank_correlation([1, 1, 2, 2], [1, 1, 2, 2]) == pytest.approx(1)
    assert rank_correlation([1, 2, 2, 5], [2, 2, 7, 1]) == pytest.approx(
        by_hand(torch.tensor([1.0, 2, 2, 5]), torch.tensor([2.0, 2, 7, 1]))
    )
    assert rank_correlation([1, 2], [1, 2]) is None
    assert rank_correlation([1, 1, 1], [1, 2, 3]) is None
    assert rank_correlation([], []) is None


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


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("prompt", PROMPTS, ids=str)
@pytest.mark.parametrize("options", [{}, {"row_block": 3}], ids=str)
def test_the_questions_attention_is_shared_among_kinds_of_tokens(
    prompt: Prompt,
    settings: dict[str, Any],
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(trace_recorder, "QUESTION_ROWS", 3)
    trace, _, slow = traced(prompt, settings, monkeypatch, **options)
    assert trace.no_attention is None
    assert [one.layer for one in trace.attention] == [1, 2, 3]
    cached = slow.known.cached
    reference = slow.reference
    assert isinstance(reference, Noted)
    for one in trace.attention:
        asked = reference.seen[one.layer][:, TOKENS - 3 :]
        fresh = torch.zeros(TOKENS, dtype=torch.bool)
        fresh[slow.probed.get(one.layer, slow.rows[one.layer])] = True
        mass = asked.mean((0, 1))
        assert one.rows == 3
        assert one.recomputed == pytest.approx(float(mass[cached & fresh].sum()), abs=1e-5)
        assert one.reused == pytest.approx(float(mass[cached & ~fresh].sum()), abs=1e-5)
        assert one.computed == pytest.approx(float(mass[~cached].sum()), abs=1e-5)
        assert one.recomputed + one.reused + one.computed == pytest.approx(1, abs=1e-5)


def test_protected_tokens_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    trace, _, slow = traced(Prompt(protected="b"), {"selector": "random"}, monkeypatch)
    start, end = ENDS["between"], ENDS["b"]
    assert trace.protected == tuple(range(start, end))
    assert not slow.eligible & set(trace.protected)


@pytest.mark.parametrize("selector", ["hkvd", "prior"])
def test_a_pass_that_leaves_the_question_out_follows_it(selector: str) -> None:
    """The engine computes it later, over the same KV: its attention is that of a whole pass."""
    config = {"selector": selector, "recompute_ratio": 0.3, "trace": True}
    chunks = placed()
    until = SPANS["c"][1]
    whole = finished(prompt_pass(filled(chunks), chunks, **config)).trace
    seen: list[int] = []
    ring = {
        "until": until, "reserve": None, "needs_hidden": False,
        "on_layer": lambda layer, _: seen.append(layer),
    }  # fmt: skip
    part = finished(prompt_pass(filled(chunks), chunks, options=ring, **config)).trace
    assert whole is not None
    assert part is not None
    assert seen == list(range(LAYERS))
    assert part.no_attention is None
    assert len(part.attention) == len(whole.attention) > 0
    for one, other in zip(whole.attention, part.attention, strict=True):
        assert (one.layer, one.rows) == (other.layer, other.rows)
        for name in ("recomputed", "reused", "computed"):
            assert getattr(other, name) == pytest.approx(getattr(one, name), abs=1e-5)


def test_following_changes_nothing_of_the_pass() -> None:
    chunks, kept = placed(), {}
    for trace in (False, True):
        ring = {
            "until": SPANS["c"][1], "reserve": None, "needs_hidden": False,
            "on_layer": lambda layer, fused, trace=trace: kept.update(
                {(trace, layer): [kv[:, : SPANS["c"][1]].clone() for kv in fused.of_layer(layer)]}
            ),
        }  # fmt: skip
        config = {"selector": "hkvd", "recompute_ratio": 0.3, "trace": trace}
        finished(prompt_pass(filled(chunks), chunks, options=ring, **config))
    for layer in range(LAYERS):
        for one, other in zip(kept[False, layer], kept[True, layer], strict=True):
            assert torch.equal(one, other)


def test_what_is_not_followed_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(question_follower, "MOST_TOKENS", 3)
    chunks = placed()
    ring = {"until": SPANS["c"][1], "needs_hidden": False}
    config = {"selector": "hkvd", "recompute_ratio": 0.3, "trace": True}
    trace = finished(prompt_pass(filled(chunks), chunks, options=ring, **config)).trace
    assert trace is not None
    assert trace.attention == ()
    assert trace.no_attention == "4 tokens after the last chunk are more than 3"


def test_ranks_trace_the_same_layers_and_attention() -> None:
    alone, first = traces_alone_and_of_ranks(selector="hkvd", recompute_ratio=0.3)
    for one, both in zip(alone.layers, first.layers, strict=True):
        assert both.values.mean == pytest.approx(2 * one.values.mean)
        assert both.keys.size == pytest.approx(2 * one.keys.size)
    for mine, ours in zip(alone.attention, first.attention, strict=True):
        assert ours.recomputed == pytest.approx(mine.recomputed)
        assert ours.reused == pytest.approx(mine.reused)
