"""Shapes are those of published models; weights repeat with their seed."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.benchmarks import shapes

TINY = shapes.ModelShape(
    "tiny", "llama", 4, 128, 2, 1, 64, 512, 4096, {"rope_type": "default", "rope_theta": 1e4}
)


def test_random_weights_repeat_with_their_seed() -> None:
    first, again = (TINY.build_model(dtype=torch.float32, device="cpu") for _ in range(2))
    other = TINY.build_model(dtype=torch.float32, device="cpu", seed=1)
    weights = [m.model.layers[2].mlp.up_proj.weight for m in (first, again, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert first.lm_head.weight is first.model.embed_tokens.weight


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("smollm2-135m", 134.5),
        ("smollm2-360m", 361.8),
        ("qwen2.5-0.5b", 494.0),
        ("llama-3.2-1b", 1235.8),
        ("mistral-7b", 7241.7),
        ("llama-3.1-8b", 8030.3),
    ],
)
def test_named_shapes_have_the_published_number_of_weights(name: str, millions: float) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shapes.named_shape(name).config())
    assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.06)
