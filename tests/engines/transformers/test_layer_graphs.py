"""Layers as CUDA graphs: in Triton's interpreter, and on a GPU where there is one."""

from __future__ import annotations

import pytest
import torch

from cacheblend_rag.engines.transformers.layer_graphs import CudaCapture, LayerGraphs
from tests.blend.kernels.interpreter import run_interpreted
from tests.engines.transformers.interpreted_layer_graphs import Prompt, gemma2, llama, stack_of


def test_padded_rows_get_what_rows_get() -> None:
    run_interpreted("tests/engines/transformers/interpreted_layer_graphs.py")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_layers_that_synchronize_with_cuda_are_run_without_graphs(caplog) -> None:
    stack = stack_of(llama, "cuda")
    own = stack.layers[1].mlp.forward
    stack.layers[1].mlp.forward = lambda hidden: own(hidden) * hidden.abs().max().clamp(1, 1).item()
    graphs = LayerGraphs(stack, stack.layers)
    for seed in range(3):
        Prompt(stack, 400, 70, seed=seed).check(graphs)
    assert not graphs.is_on
    assert "layers are run without CUDA graphs" in caplog.text
