"""What the question attends to, against square matrices of attention."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cacheblend_rag import BlendConfig
from cacheblend_rag.blend import BlendPass
from cacheblend_rag.blend.question_probe import REUSE_ONLY, probe_question
from tests.blend.fake_stack import FakeStack, Reference, WatchedKV
from tests.blend.test_passes import PROMPTS, TOKENS, Case, Prompt, Slow
from tests.prefill.prompts import run

REUSE = BlendConfig(selector="none")


def probed(prompt: Prompt, start: int, stack: FakeStack | None = None) -> tuple[Tensor, float]:
    stack = stack or FakeStack()
    fused = prompt.laid(WatchedKV(stack, prompt.tokens))
    found: tuple[Tensor, float] = run(
        probe_question(stack, prompt.ids, fused, prompt.candidates, start)
    )
    return found


@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
@pytest.mark.parametrize("layers", [3, 4])
@pytest.mark.parametrize("softcap", [None, 0.5])
def test_attention_of_the_question_is_summed_over_its_tokens_and_the_upper_layers(
    prompt: Prompt, layers: int, softcap: float | None
) -> None:
    stack = FakeStack(windows=(None, 9, None, 9)[:layers], softcap=softcap)
    start = prompt.tokens - 4
    mass, work = probed(prompt, start, stack)
    fused = prompt.laid(WatchedKV(stack, prompt.tokens))
    reference = Reference(stack, prompt.ids, fused.keys.nan_to_num(), fused.values.nan_to_num())
    known = prompt.candidates
    rows = sorted({*(~known.cached).nonzero()[:, 0].tolist(), prompt.tokens - 1})
    asking = [row for row in rows if row >= start]
    wanted, twice = torch.zeros(prompt.tokens), 0.0
    for layer in range(layers):
        reference.write(layer, rows)
        if layer >= layers // 2 and rows != [prompt.tokens - 1]:
            wanted += reference.shares(layer)[:, asking].sum(1).amax(0)
            twice += stack.costs[layer].per_pair / 2 * len(asking) * prompt.tokens
        reference.advance(layer, rows)
    torch.testing.assert_close(mass, wanted, atol=1e-5, rtol=0)
    assert mass.dtype == torch.float32
    reuse = BlendPass(
        stack, prompt.ids, prompt.laid(WatchedKV(stack, prompt.tokens)), known, REUSE_ONLY
    )
    reuse.run()
    assert work == reuse.stats.work + twice


def test_a_probe_fills_the_buffer_as_plain_reuse_does() -> None:
    prompt, stack = Prompt(), FakeStack()
    fused = prompt.laid(WatchedKV(stack, TOKENS))
    run(probe_question(stack, prompt.ids, fused, prompt.candidates, TOKENS - 4))
    slow = Slow(Case.of(prompt, REUSE))
    torch.testing.assert_close(fused.keys, slow.reference.keys, atol=1e-4, rtol=0)


def test_heads_of_all_ranks_are_looked_at() -> None:
    asked: list[tuple[str, tuple[int, ...]]] = []

    def reduced(part: Tensor, how: str) -> Tensor:
        asked.append((how, tuple(part.shape)))
        return part * 2

    alone, _ = probed(Prompt(), TOKENS - 4)
    shared, _ = probed(Prompt(), TOKENS - 4, FakeStack(reduced=reduced))
    assert asked == [("max", (2, TOKENS))], "two upper layers, each of its own"
    torch.testing.assert_close(shared, alone * 2)


def test_a_question_that_no_row_asks_attends_to_nothing() -> None:
    mass, work = probed(Prompt(), TOKENS)
    assert torch.equal(mass, torch.zeros(TOKENS))
    assert work > 0
