"""What a pass is expected to cost, against what it counted."""

from __future__ import annotations

from typing import Any

import pytest

from cacheblend_rag import BlendConfig
from cacheblend_rag.blend import BlendPass, plan_schedule
from cacheblend_rag.blend.cost import Forecast
from cacheblend_rag.blend.question_probe import probe_question
from cacheblend_rag.blend.selectors import Question
from cacheblend_rag.blend.steps import run_to_end
from tests.blend.fake_stack import LAYERS, FakeStack, WatchedKV
from tests.blend.test_passes import CHECKS, PROMPTS, Prompt


def spent_and_expected(prompt: Prompt, config: BlendConfig) -> tuple[float, float]:
    stack = FakeStack()
    schedule = plan_schedule(config, LAYERS)
    known = prompt.candidates
    fused = prompt.laid(WatchedKV(stack, prompt.tokens))
    run = BlendPass(stack, prompt.ids, fused, known, schedule)
    run_to_end(run.steps())
    spent, asks = run.work, schedule.selector
    if isinstance(asks, Question) and known.eligible.any():
        fused, last = prompt.laid(WatchedKV(stack, prompt.tokens)), prompt.tokens - 1
        probe = probe_question(stack, prompt.ids, fused, prompt.candidates, last, question=asks)
        spent += run_to_end(probe)[1]
    masks = known.cached.numpy(), known.eligible.numpy()
    return spent, Forecast(stack.costs, *masks).work(schedule)


@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
@pytest.mark.parametrize("selector", ["hkvd", "random"])
def test_without_a_choice_the_work_is_known(prompt: Prompt, selector: str) -> None:
    for ratio in (0.0, 1.0):
        config = BlendConfig(recompute_ratio=ratio, selector=selector)
        spent, expected = spent_and_expected(prompt, config)
        assert expected == pytest.approx(spent, rel=1e-12)


@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
@pytest.mark.parametrize("checks", CHECKS, ids=str)
@pytest.mark.parametrize("selector", ["hkvd", "random", "question_mid"])
def test_what_is_chosen_costs_about_what_was_expected(
    prompt: Prompt, selector: str, checks: dict[str, Any]
) -> None:
    for ratio in (0.2, 0.7):
        config = BlendConfig(selector=selector, **{"recompute_ratio": ratio, **checks})
        spent, expected = spent_and_expected(prompt, config)
        # one token more or less, since so few are rounded, and those that see much or little
        assert expected == pytest.approx(spent, rel=0.12)
