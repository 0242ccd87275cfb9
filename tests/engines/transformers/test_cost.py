"""The work behind compute_share, held against PyTorch's own count of floating-point operations.

Both are equal, not near: matrix products of the layers to the last one, attention to the last pair
of tokens. For that, rows attend one at a time: a fused kernel is counted as a rectangle, query by
all keys it is handed, and the rectangle of one row is just the pairs it sees. What is left out on
both sides is what is no matrix product (norms, rotary, softmax) and what follows the last layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count
from transformers import PreTrainedModel

from cacheblend_rag import BlendConfig, Chunk, SamplingParams, TransformersEngine
from cacheblend_rag.blend import attention
from cacheblend_rag.blend.cost import LayerCost, prefill_cost
from cacheblend_rag.engines.transformers.loop import loop_of
from cacheblend_rag.engines.transformers.trial import open_stack
from tests.models import VOCABULARY, make_model, make_tokenizer, prompt_of, words

aten = torch.ops.aten
ONE = SamplingParams(max_tokens=1)
QUESTION, HEAD, CHUNK = 9, 5, 40
FAMILIES = ("mistral-sliding", "qwen3")


ON_CPU = aten._scaled_dot_product_flash_attention_for_cpu


def attended(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """Fused attention on a CPU, which the counter does not know, counted as it counts others'."""
    return int(sdpa_flop_count(query, key, value))


@dataclass
class Counted:
    """products: all matrix products but those of fused attention."""

    products: float = 0
    attention: float = 0


@contextmanager
def counting(model: PreTrainedModel) -> Iterator[Counted]:
    """Count what the model's thread computes; the rotary embedding's outer product is left out."""
    found, loop = Counted(), loop_of(model)
    counter = FlopCounterMode(display=False, custom_mapping={ON_CPU: attended})
    loop.call(counter.__enter__)
    try:
        yield found
    finally:
        loop.call(lambda: counter.__exit__(None, None, None))
    flops = counter.get_flop_counts()
    whole = dict(flops["Global"])
    rotary = [part for name, part in flops.items() if name.endswith("rotary_emb")]
    found.attention = whole.pop(ON_CPU, 0)
    found.products = sum(whole.values()) - sum(sum(part.values()) for part in rotary)
    assert set(whole) <= {aten.mm, aten.addmm, aten.bmm}


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return make_model(request.param)


# Chunks with a document, and so with a prior; it stands whole in the prompt, so none is kept.
FIRST, SECOND = words(CHUNK, 2), words(CHUNK, 3)
CHUNKS = [Chunk(FIRST, document_id="d"), Chunk(SECOND, document_id="d", context=(FIRST,))]
PROMPT = prompt_of(words(HEAD, 1), *CHUNKS, words(QUESTION, 5))


@pytest.fixture(scope="module")
def engine(model: PreTrainedModel) -> TransformersEngine:
    engine = TransformersEngine(model, tokenizer=make_tokenizer())
    engine.precompute(CHUNKS, progress=False)
    return engine


@pytest.fixture(scope="module")
def costs(model: PreTrainedModel) -> tuple[LayerCost, ...]:
    return open_stack(model).costs


def head_cost(model: PreTrainedModel) -> float:
    return 2.0 * model.config.hidden_size * VOCABULARY


CONFIGS: dict[str, dict[str, Any]] = {
    "random": {},
    "nothing": {"recompute_ratio": 0.0},
    "everything": {"recompute_ratio": 1.0},
    "prior": {"selector": "prior"},
    "question": {"selector": "question_mid"},
    "check": {"selector": "hkvd", "check_layers": (3,)},
    "gradual": {"selector": "hkvd", "check_layers": (1, 2), "recompute_ratio": (0.6, 0.2)},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_pass_costs_what_pytorch_counts(
    model: PreTrainedModel,
    engine: TransformersEngine,
    costs: tuple[LayerCost, ...],
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention, "BLOCK_ROWS", 1)
    chosen = {"min_tokens": 0, "selector": "random", "recompute_ratio": 0.3, **CONFIGS[name]}
    config = BlendConfig(**chosen)
    with counting(model) as found:
        report = engine.generate(PROMPT, ONE, config=config).report
    assert report.blended
    assert report.selector == config.selector
    tokens = HEAD + 2 * CHUNK + QUESTION
    work = report.compute_share * prefill_cost(costs, tokens)
    counted = found.products - head_cost(model) + found.attention
    assert work == pytest.approx(counted, rel=1e-9)
    assert min(cost.per_pair for cost in costs) > 1e-8 * work, "one pair of tokens would show"


def test_prefill_costs_what_pytorch_counts(
    model: PreTrainedModel, costs: tuple[LayerCost, ...]
) -> None:
    """Of attention it counts the square; that a row sees but what is before it is our count."""
    tokens = 90
    ids = torch.randint(VOCABULARY, (1, tokens), generator=torch.Generator().manual_seed(1))
    with counting(model) as found:
        loop_of(model).call(lambda: model(input_ids=ids, use_cache=False, logits_to_keep=1))
    assert sum(cost.per_row * tokens for cost in costs) == found.products - head_cost(model)
    assert sum(cost.per_pair * tokens**2 for cost in costs) == found.attention
    pairs = [sum(min(i + 1, cost.window or tokens) for i in range(tokens)) for cost in costs]
    seen = sum(cost.per_pair * n for cost, n in zip(costs, pairs, strict=True))
    assert prefill_cost(costs, tokens) == found.products - head_cost(model) + seen
