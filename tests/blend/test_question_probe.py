"""What the question attends to, against square matrices of attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cacheblend_rag.blend import BlendPass
from cacheblend_rag.blend.question_probe import probe_question
from cacheblend_rag.blend.schedule import REUSE_ONLY
from cacheblend_rag.blend.selectors import Question
from cacheblend_rag.blend.steps import run_to_end
from cacheblend_rag.errors import ConfigError
from tests.blend.fake_stack import FakeStack, Reference, WatchedKV
from tests.blend.test_passes import PROMPTS, TOKENS, Prompt


def probed(
    prompt: Prompt,
    start: int,
    stack: FakeStack | None = None,
    **options: Any,
) -> tuple[Tensor, float]:
    stack = stack or FakeStack()
    fused = prompt.laid(WatchedKV(stack, prompt.tokens))
    question = Question(**options)
    return run_to_end(
        probe_question(stack, prompt.ids, fused, prompt.candidates, start, question=question)
    )


def attention(prompt: Prompt, start: int, stack: FakeStack) -> dict[int, Tensor]:
    """Of each layer what each question token's heads attend to, (heads, question, tokens)."""
    fused = prompt.laid(WatchedKV(stack, prompt.tokens))
    reference = Reference(stack, prompt.ids, fused.keys.nan_to_num(), fused.values.nan_to_num())
    rows = text_of(prompt)
    asking, found = [row for row in rows if row >= start], {}
    for layer in range(len(stack.windows)):
        reference.write(layer, rows)
        found[layer] = reference.shares(layer)[:, asking]
        reference.advance(layer, rows)
    return found


def text_of(prompt: Prompt) -> list[int]:
    return sorted({*(~prompt.candidates.cached).nonzero()[:, 0].tolist(), prompt.tokens - 1})


def work_of(prompt: Prompt, stack: FakeStack, layers: int) -> float:
    """What plain reuse of the first layers costs, for their KV only."""
    known = prompt.candidates
    known.cached[-1] = False
    reuse = BlendPass(
        stack, prompt.ids, prompt.laid(WatchedKV(stack, prompt.tokens)), known, REUSE_ONLY,
        layers=layers, last=0,
    )  # fmt: skip
    run_to_end(reuse.steps())
    return reuse.work


@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
@pytest.mark.parametrize(
    ("layers", "softcap", "closing", "weights"),
    [
        (3, None, 0, [0.25, 0.25, 0.25, 0.25]),
        (4, 0.5, 2, [0.25, 0.25, 0.75, 0.75]),
        (3, None, 8, [0.5, 0.5, 0.5, 0.5]),
    ],
)
def test_the_questions_last_tokens_ask_once_more_in_the_upper_layers(
    prompt: Prompt, layers: int, softcap: float | None, closing: int, weights: list[float]
) -> None:
    stack = FakeStack(windows=(None, 9, None, 9)[:layers], softcap=softcap)
    start = prompt.tokens - 4
    mass, work = probed(prompt, start, stack, span=(0.5, 1.0), heads="max", closing=closing)
    wanted, twice = torch.zeros(prompt.tokens), 0.0
    for layer, shares in attention(prompt, start, stack).items():
        if layer >= layers // 2:
            wanted += (torch.tensor(weights[-shares.shape[1] :]) @ shares).amax(0)
            twice += stack.costs[layer].per_pair / 2 * shares.shape[1] * prompt.tokens
    torch.testing.assert_close(mass, wanted, atol=1e-5, rtol=0)
    assert mass.dtype == torch.float32
    assert work == work_of(prompt, stack, layers) + twice


@pytest.mark.parametrize(
    ("options", "layers", "wanted"),
    [
        ({"heads": "sum", "span": (0.0, 1.0)}, (0, 1, 2, 3), lambda a: a.mean(1).sum(0)),
        ({"heads": "max", "layers": [1]}, (1,), lambda a: a.mean(1).amax(0)),
        ({"heads": "sum", "layers": [0, 2]}, (0, 2), lambda a: a.mean(1).sum(0)),
        ({"heads": "max", "span": (0.25, 0.75)}, (1, 2), lambda a: a.mean(1).amax(0)),
    ],
)  # fmt: skip
def test_a_probe_observes_what_it_says(
    options: dict[str, Any], layers: tuple[int, ...], wanted: Any
) -> None:
    prompt, stack = Prompt(), FakeStack()
    mass, work = probed(prompt, TOKENS - 4, stack, closing=0, **options)
    shares = attention(prompt, TOKENS - 4, FakeStack())
    expected = torch.stack([wanted(shares[layer]) for layer in layers]).sum(0)
    torch.testing.assert_close(mass, expected, atol=1e-5, rtol=0)
    twice = sum(stack.costs[layer].per_pair / 2 * 4 * TOKENS for layer in layers)
    assert work == work_of(prompt, FakeStack(), layers[-1] + 1) + twice
    assert max(event.layer for event in stack.log) == layers[-1], "no layer after the last observed"


@pytest.mark.parametrize("heads", ["sum", "max"])
def test_heads_of_all_ranks_are_looked_at(heads: str) -> None:
    asked: list[tuple[str, tuple[int, ...]]] = []

    def reduced(part: Tensor, how: str) -> Tensor:
        asked.append((how, tuple(part.shape)))
        return part * 2

    alone, _ = probed(Prompt(), TOKENS - 4, heads=heads)
    shared, _ = probed(Prompt(), TOKENS - 4, FakeStack(reduced=reduced), heads=heads)
    assert asked == [(heads, (2, TOKENS))], "two layers, each of its own"
    torch.testing.assert_close(shared, alone * 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"span": (0.5, 0.5)}, r"span=\(0.5, 0.5\) must be strictly rising"),
        ({"span": (0.5, 1.5)}, "span="),
        ({"span": ("a", 1.0)}, "span="),
        ({"span": 0.5}, "span=0.5"),
        ({"layers": []}, r"layers=\[\]"),
        ({"layers": [2, 2]}, r"layers=\[2, 2\] must be strictly rising"),
        ({"layers": [-1]}, "layers="),
        ({"layers": "12"}, "layers="),
        ({"layers": [True]}, "layers="),
        ({"closing": -1}, "closing=-1"),
        ({"reach": -1}, "reach=-1"),
        ({"heads": "mean"}, "heads='mean' must be 'sum' or 'max'"),
    ],
)
def test_an_option_out_of_range_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Question(**options)
