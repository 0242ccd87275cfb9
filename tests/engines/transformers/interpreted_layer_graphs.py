"""Layers on padded rows, as graphs hold them, in Triton's interpreter; run by test_layer_graphs.py.

Instead of a CUDA graph, a recording of the operations is run again, with the numbers and addresses
that they had: one that needs others computes something wrong.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from cacheblend_rag.blend import row_attention
from cacheblend_rag.blend.fused import FusedKV
from cacheblend_rag.blend.passes import BlendPass, Candidates
from cacheblend_rag.blend.rows import Rows
from cacheblend_rag.blend.schedule import REUSE_ONLY
from cacheblend_rag.blend.steps import run_to_end
from cacheblend_rag.engines.transformers import layer_graphs
from cacheblend_rag.engines.transformers.layer_graphs import LayerGraphs, PromptGraphs, Replay
from cacheblend_rag.engines.transformers.stack import TransformersStack
from tests.recording import Recording

SIZES = {
    "vocab_size": 60, "hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1,
    "intermediate_size": 96, "num_hidden_layers": 3, "head_dim": 64,
}  # fmt: skip


def llama() -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def gemma2() -> PreTrainedModel:
    """With a window in every other layer, and soft caps."""
    return Gemma2ForCausalLM(Gemma2Config(**SIZES, sliding_window=20))


class Captured:
    """Captures a layer as a recording. count: of the layers captured. replayed: how often."""

    def __init__(self, spoil: Callable[[], None] = lambda: None) -> None:
        self.count, self._spoil = 0, spoil
        self.replayed = 0

    def __call__(self, work: Callable[[], None]) -> Replay:
        self.count += 1
        attend = layer_graphs.attend_by_positions
        with Recording() as recording, pytest.MonkeyPatch.context() as patch:
            # What a kernel does is not seen by the recording.
            patch.setattr(layer_graphs, "attend_by_positions", recording.noted(attend))
            work()

        def replay() -> None:
            self.replayed += 1
            recording.replay()
            self._spoil()

        return replay


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_attention, "has_kernels", lambda _: True)
    monkeypatch.setattr(layer_graphs, "MULTIPLE", 8)
    row_attention.works.cache_clear()


def stack_of(make: Callable[[], PreTrainedModel], device: str = "cpu") -> TransformersStack:
    torch.manual_seed(1)
    return TransformersStack(make().half().eval().to(device))


class Prompt:
    """A prompt of random tokens whose KV is there, of which some rows are computed anew."""

    def __init__(self, stack: TransformersStack, tokens: int, count: int, seed: int) -> None:
        draw = np.random.default_rng(seed)
        self.ids = torch.from_numpy(draw.integers(1, 60, tokens)).to(stack.geometry.device)
        self.stack = stack
        self.stored = FusedKV(stack.geometry, tokens)
        noise = torch.Generator().manual_seed(seed)
        for part in (self.stored.keys, self.stored.values):
            part.copy_(torch.randn(part.shape, generator=noise))
        self.cached = torch.ones(tokens, dtype=torch.bool)
        self.cached[draw.choice(tokens, count, replace=False)] = False
        self.cached[-1] = False

    @torch.inference_mode()
    def blended(self, graphs: LayerGraphs | None) -> tuple[torch.Tensor, FusedKV]:
        """Return the last hidden state, and the prompt's KV."""
        fused = FusedKV(self.stack.geometry, len(self.ids), reserve=5)
        fused.keys[:, :, : len(self.ids)] = self.stored.keys
        fused.values[:, :, : len(self.ids)] = self.stored.values
        nothing = torch.zeros_like(self.cached)
        candidates = Candidates(self.cached, nothing, torch.zeros(len(self.ids), dtype=torch.long))
        run = BlendPass(
            self.stack, self.ids, fused, candidates, REUSE_ONLY,
            graphed=None if graphs is None else graphs.of,
        )  # fmt: skip
        run_to_end(run.steps())
        return run.hidden, fused

    def check(self, graphs: LayerGraphs) -> None:
        """Compare a pass with graphs to one without."""
        wanted, plain = self.blended(None)
        found, fused = self.blended(graphs)
        seen = slice(0, len(self.ids))
        assert apart(found, wanted) < 5e-3
        assert apart(fused.keys[:, :, seen], plain.keys[:, :, seen]) < 5e-3
        assert apart(fused.values[:, :, seen], plain.values[:, :, seen]) < 5e-3


def apart(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the largest difference of a row, relative to its norm."""
    gone = (found - wanted).float().norm(dim=-1) / wanted.float().norm(dim=-1)
    return float(gone.max())


@pytest.mark.parametrize("make", [llama, gemma2])
def test_prompts_of_all_lengths_share_the_graphs_of_a_number_of_rows(
    make: Callable[[], PreTrainedModel],
) -> None:
    stack, captured = stack_of(make), Captured()
    graphs = LayerGraphs(stack, stack.layers, captured)
    Prompt(stack, 90, 13, seed=1).check(graphs)
    assert not captured.count, "the first time, none is captured"
    Prompt(stack, 70, 10, seed=2).check(graphs)
    assert captured.count == 2, "the last layer runs for one row"
    Prompt(stack, 110, 15, seed=3).check(graphs)
    Prompt(stack, 40, 9, seed=4).check(graphs)
    assert captured.count == 2
    assert captured.replayed == 2 * 3
    assert graphs.is_on


def test_passes_may_take_turns() -> None:
    stack = stack_of(llama)
    graphs = LayerGraphs(stack, stack.layers, Captured())
    prompts = [Prompt(stack, 60 + 9 * seed, 11, seed=seed) for seed in range(3)]
    for prompt in prompts:
        prompt.check(graphs)
    with torch.inference_mode():
        rows = [Rows.where(~prompt.cached.numpy(), torch.device("cpu")) for prompt in prompts]
        hidden = [stack.embed(p.ids[r.device][None]) for p, r in zip(prompts, rows, strict=True)]
        runs = [graphs.of(r, p.stored) for p, r in zip(prompts, rows, strict=True)]
        alone = [run.run(0, h).clone() for run, h in zip(runs, hidden, strict=True)]
        first = runs[0].run(1, alone[0]).clone()
        runs[1].run(1, alone[1])
        torch.testing.assert_close(runs[0].run(1, alone[0]), first, atol=0, rtol=0)
        assert not torch.equal(alone[0], alone[1])


def test_a_graph_with_another_result_is_not_used(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = stack_of(llama)
    graphs = LayerGraphs(stack, stack.layers)
    prompt, buffers = Prompt(stack, 90, 13, seed=1), list[FusedKV]()
    of = graphs.of

    def noted(rows: Rows, fused: FusedKV) -> PromptGraphs | None:
        buffers.append(fused)
        return of(rows, fused)

    def spoil() -> None:
        for inputs in graphs._seen.values():
            inputs.out.mul_(1.1)
        buffers[-1].keys[0][:, : len(prompt.ids)][:, ~prompt.cached] = 0

    graphs._capture = Captured(spoil)
    monkeypatch.setattr(graphs, "of", noted)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            prompt.check(graphs)
    assert not graphs.is_on
    assert [record.getMessage() for record in caplog.records] == [
        "layers are run without CUDA graphs: layer 0 differs by 0.1 of its size"
    ]


def test_a_model_with_hooks_gets_none() -> None:
    stack, captured = stack_of(llama), Captured()
    graphs = LayerGraphs(stack, stack.layers, captured)
    prompt = Prompt(stack, 90, 13, seed=1)
    prompt.check(graphs)
    handle = stack.layers[1].mlp.register_forward_hook(lambda _, __, out: out * 2)
    prompt.check(graphs)
    assert not captured.count
    handle.remove()
    prompt.check(graphs)
    assert captured.count == 2
