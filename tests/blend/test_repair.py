"""Repair of stored KV by the mean change of a chunk's recomputed tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from cacheblend_rag import BlendConfig
from cacheblend_rag.blend import BlendPass, plan_schedule
from cacheblend_rag.blend.rotary import rotated
from tests.blend.fake_stack import LAYERS, FakeStack, WatchedKV
from tests.blend.test_passes import SPANS, Prompt

CHOOSING = ({"selector": "random"}, {"selector": "prior"}, {"selector": "hkvd"})


def run_pass(prompt: Prompt, config: BlendConfig, **options: Any) -> tuple[BlendPass, WatchedKV]:
    stack = FakeStack()
    first, fused = (prompt.laid(WatchedKV(stack, prompt.tokens)) for _ in range(2))
    chunks = torch.full((prompt.tokens,), -1)
    for index, name in enumerate(prompt.hits):
        chunks[slice(*SPANS[name])] = index
    known = replace(prompt.candidates, chunks=chunks)
    schedule = plan_schedule(config, LAYERS)
    run = BlendPass(stack, prompt.ids, fused, known, schedule, **options)
    run.run()
    return run, first


def moved(stack: FakeStack, layer: int, keys: Tensor, by: int) -> Tensor:
    """Keys (kv_heads, head_dim) at a position that is farther by so much."""
    return rotated(keys[None, :, None], stack.rotation(by).of(layer))[0, :, 0]


@pytest.mark.parametrize("row_block", [None, 4])
@pytest.mark.parametrize("choosing", CHOOSING, ids=str)
@pytest.mark.parametrize(("keys", "values"), [(1.0, 0.0), (0.5, 0.25), (0.0, 1.0)])
@pytest.mark.parametrize("prompt", [Prompt(), Prompt(hits="ac", protected="c")], ids=str)
def test_other_tokens_move_by_the_mean_change_of_the_recomputed(
    prompt: Prompt, keys: float, values: float, choosing: dict[str, Any], row_block: int | None
) -> None:
    """Layer for layer, each key unrotated from its own position."""
    config = BlendConfig(recompute_ratio=0.3, key_repair=keys, value_repair=values, **choosing)
    run, first = run_pass(prompt, config, row_block=row_block)
    stack, computed = FakeStack(), run.stats.recomputed
    for layer in range(2, LAYERS):
        for name in prompt.hits:
            mine = [row for row in range(*SPANS[name]) if computed[row]]
            others = [row for row in range(*SPANS[name]) if not computed[row]]
            stored, now = ((kv.keys[layer], kv.values[layer]) for kv in (first, run.fused))
            if not mine:
                assert all(torch.equal(a[:, others], b[:, others]) for a, b in zip(stored, now))  # noqa: B905
                continue
            changes = [moved(stack, layer, now[0][:, r] - stored[0][:, r], -r) for r in mine]
            change = torch.stack(changes).mean(0)
            for row in others:
                wanted = stored[0][:, row] + keys * moved(stack, layer, change, row)
                torch.testing.assert_close(now[0][:, row], wanted, atol=1e-4, rtol=1e-4)
            by = (now[1][:, mine] - stored[1][:, mine]).mean(1, keepdim=True)
            wanted = stored[1][:, others] + values * by
            torch.testing.assert_close(now[1][:, others], wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("choosing", CHOOSING, ids=str)
@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_where_all_or_nothing_is_recomputed_nothing_is_repaired(
    choosing: dict[str, Any], ratio: float
) -> None:
    repaired = BlendConfig(recompute_ratio=ratio, key_repair=1.0, value_repair=1.0, **choosing)
    plain = BlendConfig(recompute_ratio=ratio, **choosing)
    (one, _), (other, _) = run_pass(Prompt(), repaired), run_pass(Prompt(), plain)
    assert torch.equal(one.fused.keys, other.fused.keys)
    assert torch.equal(one.fused.values, other.fused.values)
    assert torch.equal(one.hidden, other.hidden)


def test_layer_zero_and_protected_tokens_stay_as_stored() -> None:
    prompt = Prompt(protected="b")
    config = BlendConfig(selector="random", recompute_ratio=0.3, key_repair=1.0, value_repair=1.0)
    run, first = run_pass(prompt, config)
    kept = slice(*SPANS["b"])
    assert torch.equal(run.fused.keys[:, :, kept], first.keys[:, :, kept])
    stays = run.candidates.cached & ~torch.from_numpy(run.stats.recomputed)
    assert torch.equal(run.fused.values[0][:, stays], first.values[0][:, stays])
    assert not torch.equal(run.fused.values[1][:, stays], first.values[1][:, stays])


def test_the_size_of_blocks_does_not_matter() -> None:
    config = BlendConfig(selector="random", recompute_ratio=0.5, key_repair=1.0, value_repair=1.0)
    (whole, _), (blocks, _) = (run_pass(Prompt(), config, row_block=size) for size in (None, 3))
    torch.testing.assert_close(blocks.fused.keys, whole.fused.keys, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(blocks.fused.values, whole.fused.values, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(blocks.hidden, whole.hidden, atol=1e-5, rtol=1e-4)
