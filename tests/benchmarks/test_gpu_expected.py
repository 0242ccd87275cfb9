"""The arithmetic of docs/gpu.md, and that the page states what it gives."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from cacheblend_rag.bench.shapes import named_shape
from tests.benchmarks.gpu_expected import CARDS, ExpectedPlan, Prefill, expected, markdown
from tests.readme import DOCS

PAGE = DOCS / "gpu.md"
SHAPE = named_shape("llama-3.1-8b")


def test_the_page_states_what_the_arithmetic_gives():
    text = PAGE.read_text()
    for line in markdown(expected(ExpectedPlan())):
        assert line in text


def test_the_page_states_the_inputs():
    text = PAGE.read_text()
    for name, card in CARDS.items():
        rates = (card.products, card.causal, card.scattered)
        cells = [name, *(f"{rate / 1e12:.0f}" for rate in rates)]
        cells += [f"{card.memory / 1e12:.2f}", f"{card.link / 1e9:.0f}"]
        assert f"| {' | '.join(cells)} |" in text


@pytest.mark.parametrize("card", CARDS)
def test_fewer_rows_take_less_time(card):
    prefill = Prefill(CARDS[card], SHAPE, 8224)
    assert prefill.blend(0.15, True) > prefill.blend(0.15, False) > prefill.blend(0.05, False)
    assert prefill.ordinary() > prefill.blend(0.15, True)


@pytest.mark.parametrize(("tokens", "measured"), [(4096, 139), (8192, 298)])
def test_ordinary_prefill_is_near_what_an_h100_took(tokens, measured):
    """In milliseconds, as docs/gpu.md states them."""
    assert 1e3 * Prefill(CARDS["H100"], SHAPE, tokens + 32).ordinary() == pytest.approx(
        measured, rel=0.1
    )


def test_all_weights_are_counted():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(SHAPE.config())
    of_layer = sum(part.numel() for part in model.model.layers[0].parameters() if part.dim() > 1)
    assert Prefill(CARDS["H200"], SHAPE, 100).cost.per_row == 2 * of_layer
