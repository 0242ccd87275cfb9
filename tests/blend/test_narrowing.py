"""Narrowing of rows by the question's own attention, against attention written out."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from cacheblend_rag import BlendConfig
from cacheblend_rag.blend import plan_schedule
from cacheblend_rag.blend.forecast import Forecast
from cacheblend_rag.blend.narrowing import QUESTION_ROWS
from cacheblend_rag.blend.observer import Observer, Selection
from cacheblend_rag.blend.rows import Rows
from cacheblend_rag.blend.stack import AttentionCall
from cacheblend_rag.errors import ConfigError
from tests.blend.fake_stack import HEADS, KV_HEADS, LAYERS, WINDOWS, FakeStack
from tests.blend.test_passes import SPANS, TOKENS, Case, Prompt, flat

QUESTION = SPANS["question"][0]
ONCE: dict[str, Any] = {"recompute_ratio": 0.6, "narrow_at": (0.75,), "narrow_to": (0.2,)}
TWICE: dict[str, Any] = {
    "recompute_ratio": 0.8, "narrow_at": (0.3, 0.75), "narrow_to": (0.5, 0.2),
}  # fmt: skip
FIRST = {"random": {}, "prior": {}, "hkvd": {"check_layers": (1,)}}


class Watch(Observer):
    """Keeps choices, and what the question's rows attend to in each layer, (tokens,)."""

    def __init__(self) -> None:
        self.choices: list[Selection] = []
        self.masses: dict[int, Tensor] = {}

    def selected(self, selection: Selection) -> None:
        self.choices.append(selection)

    def attended(self, call: AttentionCall, rows: Rows, keys: Tensor) -> None:
        for index, position in enumerate(rows.host.tolist()):
            if position < QUESTION:
                continue
            window = WINDOWS[call.layer] or TOKENS
            seen = slice(max(0, position - window + 1), position + 1)
            for head in range(HEADS):
                key = keys[0, head // (HEADS // KV_HEADS), seen]
                logits = key @ call.query[0, head, index] * call.scaling
                mass = self.masses.setdefault(call.layer, torch.zeros(keys.shape[2]))
                mass[seen] += logits.softmax(0)


def narrowed(prompt: Prompt, config: BlendConfig, **options: Any) -> tuple[Case, Watch]:
    watch = Watch()
    options = {"question_start": QUESTION, **options}
    return Case.of(prompt, config, observers=[watch], **options), watch


@pytest.mark.parametrize("row_block", [None, 3])
@pytest.mark.parametrize("first", FIRST)
@pytest.mark.parametrize("prompt", [Prompt(), Prompt(hits="ac", protected="c")], ids=str)
def test_rows_are_narrowed_to_those_the_question_attends_to(
    prompt: Prompt, first: str, row_block: int | None
) -> None:
    config = BlendConfig(selector=first, **FIRST[first], **ONCE)
    case, watch = narrowed(prompt, config, row_block=row_block)
    eligible = prompt.candidates.eligible
    before, then = watch.choices
    assert then.layer == 3
    assert then.positions.tolist() == before.chosen.tolist()
    assert len(before.chosen) == math.ceil(0.6 * int(eligible.sum()))
    wanted = watch.masses[0] + watch.masses[2]  # the others have a window
    torch.testing.assert_close(then.scores, wanted[then.positions], atol=1e-5, rtol=1e-4)
    count = math.ceil(0.2 * int(eligible.sum()))
    best = sorted(then.positions.tolist(), key=lambda row: -float(wanted[row]))[:count]
    assert then.chosen.tolist() == sorted(best)
    assert case.run.stats.recomputed.nonzero()[0].tolist() == sorted(best)
    dropped = sorted(set(before.chosen) - set(best))
    here = (case.run.fused.keys, case.first.keys), (case.run.fused.values, case.first.values)
    for now, stored in here:
        assert torch.equal(now[3][:, dropped], stored[3][:, dropped])
        assert not torch.isclose(now[2][:, dropped], stored[2][:, dropped]).all()


def test_two_depths_narrow_step_by_step() -> None:
    case, watch = narrowed(Prompt(), BlendConfig(selector="random", **TWICE))
    assert [choice.layer for choice in watch.choices] == [None, 2, 3]
    assert [len(choice.chosen) for choice in watch.choices] == [17, 11, 5]
    for earlier, later in zip(watch.choices, watch.choices[1:], strict=False):
        assert later.positions.tolist() == earlier.chosen.tolist()
    torch.testing.assert_close(
        watch.choices[1].scores, watch.masses[0][watch.choices[1].positions], atol=1e-5, rtol=1e-4
    )
    assert len(flat(case.stack.log, "run", 2)) == 9 + 11


def test_a_narrowing_that_is_no_narrower_changes_nothing() -> None:
    plain = Case.of(Prompt(), BlendConfig(selector="random", recompute_ratio=0.2))
    config = BlendConfig(selector="random", recompute_ratio=0.2, narrow_at=(0.5,), narrow_to=(0.4,))
    case, _ = narrowed(Prompt(), config)
    assert torch.equal(case.run.fused.keys, plain.run.fused.keys)
    assert torch.equal(case.run.hidden, plain.run.hidden)


@pytest.mark.parametrize("start", [None, TOKENS])
def test_without_a_question_the_scores_of_the_last_choice_decide(start: int | None) -> None:
    case, watch = narrowed(Prompt(), BlendConfig(selector="prior", **ONCE), question_start=start)
    least = Case.of(Prompt(), BlendConfig(selector="prior", recompute_ratio=0.2))
    assert case.run.stats.recomputed.tolist() == least.run.stats.recomputed.tolist()
    assert watch.choices[1].scores.tolist() == [
        float(case.prompt.candidates.prior[row])  # type: ignore[index]
        for row in watch.choices[1].positions
    ]


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_nothing_and_everything_are_not_narrowed(ratio: float) -> None:
    config = BlendConfig(
        selector="prior", recompute_ratio=ratio, narrow_at=(0.5,), narrow_to=(0.1,)
    )
    case, watch = narrowed(Prompt(), config)
    plain = Case.of(Prompt(), BlendConfig(selector="prior", recompute_ratio=ratio))
    assert torch.equal(case.run.fused.keys, plain.run.fused.keys)
    assert torch.equal(case.run.hidden, plain.run.hidden)
    assert case.run.stats.work == plain.run.stats.work
    assert not [choice for choice in watch.choices if choice.layer is not None]


def test_attention_is_that_of_all_ranks_heads() -> None:
    asked: list[str] = []

    def summed(part: Tensor, how: str) -> Tensor:
        asked.append(how)
        return torch.arange(len(part)).float()

    stack = FakeStack(reduced=summed)
    _, watch = narrowed(Prompt(), BlendConfig(selector="random", **ONCE), stack=stack)
    assert asked == ["sum"]
    assert watch.choices[1].chosen.tolist() == watch.choices[0].chosen.tolist()[-5:]


def test_the_attention_is_part_of_the_work_and_the_rest_is_forecast() -> None:
    config = BlendConfig(selector="random", **ONCE)
    case, _ = narrowed(Prompt(), config)
    plain = Case.of(Prompt(), config)  # without a question
    costs = case.stack.costs
    rows = TOKENS - QUESTION
    measured = sum(costs[layer].per_pair / 2 * rows * TOKENS for layer in (0, 2))
    known = case.prompt.candidates
    forecast = Forecast(costs, known.cached.numpy(), known.eligible.numpy())
    expected = forecast.work(plan_schedule(config, LAYERS))
    assert expected == pytest.approx(plain.run.stats.work, rel=0.12)
    assert expected == pytest.approx(case.run.stats.work - measured, rel=0.12)
    assert rows < QUESTION_ROWS


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"narrow_at": (0.5,)}, r"narrow_to=\(\) must hold one ratio for each"),
        ({"narrow_at": (0.5, 0.3), "narrow_to": (0.2, 0.1)}, "narrow_at=.* must rise"),
        ({"narrow_at": (0.3, 0.5), "narrow_to": (0.1, 0.2)}, "narrow_to=.* must not rise"),
        ({"narrow_at": (1.5,), "narrow_to": (0.1,)}, "narrow_at=.* must be a list of depths"),
        ({"narrow_at": (0.5,), "narrow_to": ("x",)}, "narrow_to=.* must be a list of numbers"),
    ],
)
def test_wrong_depths_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BlendConfig(**settings)


def test_depths_are_layers_after_the_last_check() -> None:
    config = BlendConfig(selector="prior", narrow_at=(0.0, 0.3, 1.0), narrow_to=(0.3, 0.2, 0.1))
    assert plan_schedule(config, 10).narrowings == {1: 0.3, 3: 0.2, 9: 0.1}
    assert plan_schedule(config, 10).ratio == 0.1
    assert plan_schedule(config, 2).narrowings == {1: 0.1}, "the deepest of one layer"
    hkvd = BlendConfig(check_layers=(1, 4), narrow_at=(0.4,), narrow_to=(0.1,))
    with pytest.raises(
        ConfigError, match="begins at layer 4 of 10: it must be after check layer 4"
    ):
        plan_schedule(hkvd, 10)
    assert plan_schedule(hkvd, 20).narrowings == {8: 0.1}
