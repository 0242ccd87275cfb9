"""Layers as CUDA graphs: in Triton's interpreter, and on a GPU where there is one."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from cacheblend_rag import BlendConfig, TransformersEngine
from cacheblend_rag.bench.workload import LEAD_IN
from cacheblend_rag.engines.transformers.layer_graphs import CudaCapture, LayerGraphs, PromptGraphs
from cacheblend_rag.kv.store import TieredKVStore
from cacheblend_rag.settings import StoreConfig
from cacheblend_rag.text.prompt import BlendPrompt
from tests.benchmarks.shapes import draw_chunks, draw_words, named_shape
from tests.blend.kernels.interpreter import run_interpreted
from tests.engines.transformers.interpreted_layer_graphs import Prompt, gemma2, llama, stack_of

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_padded_rows_get_what_rows_get() -> None:
    run_interpreted("tests/engines/transformers/interpreted_layer_graphs.py")


@needs_gpu
@pytest.mark.parametrize("make", [llama, gemma2])
def test_cuda_graphs_compute_what_layers_do(make, caplog) -> None:
    stack = stack_of(make, "cuda")
    captures: list[int] = []
    capture = CudaCapture(stack.geometry.device)

    def counted(work):
        captures.append(1)
        return capture(work)

    graphs = LayerGraphs(stack, stack.layers, counted)
    for tokens, count in ((400, 70), (300, 90), (500, 100), (200, 65), (700, 128), (600, 200)):
        Prompt(stack, tokens, count, seed=tokens).check(graphs)
    assert graphs.is_on, caplog.text
    assert len(captures) == 2, "each layer but the last, once"


@needs_gpu
def test_layers_that_synchronize_with_cuda_are_run_without_graphs(caplog) -> None:
    stack = stack_of(llama, "cuda")
    own = stack.layers[1].mlp.forward
    stack.layers[1].mlp.forward = lambda hidden: own(hidden) * hidden.abs().max().clamp(1, 1).item()
    graphs = LayerGraphs(stack, stack.layers)
    for seed in range(3):
        Prompt(stack, 400, 70, seed=seed).check(graphs)
    assert not graphs.is_on
    assert "layers are run without CUDA graphs" in caplog.text


@pytest.fixture(scope="module")
def asked():
    """An engine on a GPU with chunks in its host tier, and questions of which each is longer."""
    shape = replace(
        named_shape("llama-3.1-8b"),
        layers=4, hidden=512, heads=8, kv_heads=2, intermediate=1024, vocabulary=500,
    )  # fmt: skip
    model = shape.build_model(dtype=torch.bfloat16, device="cuda")
    rng = random.Random(3)
    chunks = draw_chunks(rng, 6, 100, shape.vocabulary, selector="hkvd", name="chunks")
    with TieredKVStore.of(StoreConfig(tiers=("host://",)), device="cuda") as store:
        engine = TransformersEngine(
            model, tokenizer=shape.build_tokenizer(), lead_in=LEAD_IN, store=store
        )
        engine.precompute(chunks, progress=False)
        prompts = [
            BlendPrompt.of(*rng.sample(chunks, 6), draw_words(rng, words, shape.vocabulary))
            for words in range(10, 20)
        ]
        yield engine, prompts


@needs_gpu
def test_ratio_one_equals_ordinary_prefill_with_cuda(asked) -> None:
    engine, prompts = asked
    config = BlendConfig(selector="hkvd", recompute_ratio=1.0, min_tokens=0, cost_model=False)
    for prompt in prompts[:4]:
        blend, full = scores_of(engine, prompt, config), scores_of(engine, prompt, None)
        assert float((blend - full).abs().max()) < 0.1


@needs_gpu
@pytest.mark.parametrize("selector", ["hkvd", "random", "question_mid"])
def test_blends_by_cuda_graphs_are_those_without(asked, selector, monkeypatch) -> None:
    engine, prompts = asked
    config = BlendConfig(
        selector=selector, recompute_ratio=0.2, check_layers=(1,), min_tokens=0, cost_model=False
    )
    runs: list[int] = []
    run = PromptGraphs.run

    def counted(self, layer, hidden):
        runs.append(layer)
        return run(self, layer, hidden)

    monkeypatch.setattr(PromptGraphs, "run", counted)
    for prompt in prompts[:3]:
        scores_of(engine, prompt, config)
    assert runs
    for prompt in prompts[3:]:
        before = len(runs)
        found = scores_of(engine, prompt, config)
        assert len(runs) > before
        with monkeypatch.context() as patch:
            patch.setattr(LayerGraphs, "of", lambda *_: None)
            wanted = scores_of(engine, prompt, config)
        assert float((found - wanted).abs().max()) < 0.1


def scores_of(engine, prompt, config) -> torch.Tensor:
    """Return log-probabilities after a blend, or after ordinary prefill if there is no config."""
    scored = engine.score(prompt, [7, 8, 9], config=config, full=config is None)
    assert scored.report.blended == (config is not None), scored.report
    return scored.log_probs
