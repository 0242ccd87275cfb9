"""What a blend pass asks of a device: never an answer within a layer, and few operations.

Models stand on the meta device, which computes nothing and has no answer to give: whatever asks for
one raises. So every operation counted here is one that an accelerator is launched for.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from cacheblend_rag import BlendConfig
from cacheblend_rag.blend import BlendPass, FusedKV, plan_schedule
from cacheblend_rag.blend.passes import Candidates
from cacheblend_rag.engines.transformers.stack import TransformersStack
from cacheblend_rag.engines.transformers.trial import open_stack
from tests.models import make_model
from tests.operations import Operations

TOKENS, CHUNK = 400, 300
META = torch.device("meta")
PLAIN = BlendConfig(selector="random")
MOST_A_BLOCK = {"llama": 45, "mistral-sliding": 47, "qwen3": 64}
"""Launches of one layer over one block of rows, the model's own included; they may only fall."""


def on_meta(family: str) -> TransformersStack:
    stack = open_stack(make_model(family))
    stack.model.to(META)
    stack._device = META
    stack._geometry = replace(stack.geometry, device=META)
    stack._rotation.cache_clear()
    return stack


def launches(
    family: str, ratio: float, row_block: int, **settings: Any
) -> list[tuple[list[int], Operations]]:
    """Run a pass whose rows are chosen before layer 0; each step's finished layers and launches."""
    stack = on_meta(family)
    stack.row_block = row_block
    fused = FusedKV(stack.geometry, TOKENS)
    known = Candidates.none(TOKENS)
    known.cached[:CHUNK] = known.eligible[:CHUNK] = True
    config = PLAIN.with_changes(recompute_ratio=ratio, **settings)
    finished: list[int] = []
    run = BlendPass(
        stack,
        torch.zeros(TOKENS, dtype=torch.long, device=META),
        fused,
        known,
        plan_schedule(config, stack.geometry.layers),
        on_layer=lambda layer, _: finished.append(layer),
    )
    steps = []
    going = run.steps()
    while True:
        with Operations() as seen:
            try:
                next(going)
            except StopIteration:
                return steps
        steps.append((finished.copy(), seen))
        finished.clear()


@pytest.mark.parametrize("family", MOST_A_BLOCK)
@pytest.mark.parametrize("ratio", [0.3, 1.0])
def test_no_layer_asks_the_device_for_anything(family: str, ratio: float) -> None:
    with torch.inference_mode():
        steps = launches(family, ratio, row_block=64)
    assert [layer for layers, _ in steps for layer in layers] == [0, 1, 2, 3]
    assert [seen.reads for _, seen in steps] == [[]] * len(steps)
    assert all(seen.launched for _, seen in steps)


@pytest.mark.parametrize("family", MOST_A_BLOCK)
def test_a_layer_launches_few_operations_a_block(family: str) -> None:
    with torch.inference_mode():
        steps = launches(family, 0.3, row_block=64)
    counts = [seen.launched.total() for _, seen in steps[1:-1]]
    assert max(counts) <= MOST_A_BLOCK[family], steps[1][1].launched
