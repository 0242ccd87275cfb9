"""Models that vLLM compiles: ratio 1 is ordinary prefill bit for bit, as where it does not."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch._dynamo.callback import callback_handler
from vllm.forward_context import set_forward_context

from cacheblend_rag import BlendConfig
from cacheblend_rag.blend.stack import probe_layer
from cacheblend_rag.engines.vllm.connector.metadata import StepJobs
from cacheblend_rag.engines.vllm.connector.worker import ConnectorWorker
from tests.engines.vllm.exactness import check_exact, index
from tests.engines.vllm.inprocess import InProcessEngine

COMPILED = ("gemma3", "qwen3-moe")
"""Compiling takes a minute each; these have all that is compiled for the layers alone, and what no
other family here has: two rotary tables, and experts alone."""


@pytest.mark.parametrize("family", COMPILED)
def test_a_compiled_model_is_exact_too(model_folder: Callable[[str], Path], family: str) -> None:
    config = BlendConfig(min_tokens=0, selector="hkvd")
    opened = InProcessEngine.open(model_folder(family), config, enforce_eager=False)
    with closing(opened) as engine:
        with patch.object(ConnectorWorker, "work", watched):
            index(engine)
            check_exact(engine)
        assert not COMPILATIONS, "all kernels are compiled at start"
        check_single_rows(engine)


COMPILATIONS: list[Any] = []
"""Of functions, begun while jobs ran."""
WORK = ConnectorWorker.work


def watched(worker: ConnectorWorker, step: StepJobs) -> None:
    """Run jobs, and note what is compiled meanwhile: vLLM's sampler is compiled on first use."""
    callback_handler.register_start_callback(COMPILATIONS.append)
    WORK(worker, step)
    callback_handler.remove_start_callback(COMPILATIONS.append)


def check_single_rows(engine: InProcessEngine) -> None:
    """Rows are computed alone as among others, by kernels that are there already.

    The kernels of one row are others, and the compiler would begin only when a request needs one.
    """
    stack = engine.worker_connector.blender.stack
    no_recompiling = torch._dynamo.config.patch(error_on_recompile=True)
    in_worker = set_forward_context(None, engine.core.vllm_config)
    with in_worker, torch.inference_mode(), no_recompiling:
        hidden = torch.randn_like(stack.embed(torch.arange(5)[None]))
        calls = [
            probe_layer(
                stack, 1, hidden[:, rows], stack.position_inputs(torch.arange(5)[None, rows])
            )
            for rows in (slice(None), *(slice(i, i + 1) for i in range(5)))
        ]
    for name in ("query", "key", "value"):
        together, *alone = [getattr(call, name) for call in calls]
        assert torch.equal(together, torch.cat(alone, 2))
