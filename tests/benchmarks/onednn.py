"""`python -m tests.benchmarks.onednn`: what oneDNN saves in a model's own forward on a CPU.

Three copies of a model are run in turn: as PyTorch runs it; with weights packed; and with attention
by matrix products, too. The embedded engine runs models that it loads by name as the first on
Intel's CPUs, and as the third on others with AVX-512; the copies are so on every x86 CPU.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from transformers import PreTrainedModel

from cacheblend_rag.bench.interleave import Advance, run_in_turns
from cacheblend_rag.bench.plan import ModelPlan, option
from cacheblend_rag.blend import matmul_attention
from cacheblend_rag.blend.onednn import has_onednn
from cacheblend_rag.cli.plan_command import facts
from cacheblend_rag.engines.transformers import matmul_prefill
from cacheblend_rag.engines.transformers.matmul_prefill import use_matmul_attention
from cacheblend_rag.engines.transformers.packed_weights import LEAST_ELEMENTS_AVX512, pack_weights
from tests.benchmarks.command import benchmark_app

PYTORCH, PACKED, MATMUL = "pytorch", "packed", "packed, matmul attention"


@dataclass(frozen=True, kw_only=True)
class OnednnPlan(ModelPlan):
    """Seconds of ordinary prefill and of a decode step: PyTorch's, and with oneDNN's products."""

    prompt_tokens: int = option(4128, "Tokens of the prompt.", least=1)
    cached_tokens: int = option(600, "Tokens before a decode step.", least=1)
    repeat: int = option(3, "Timed runs each; medians are shown.", least=1)


@torch.inference_mode()
def measure_onednn(plan: OnednnPlan, advance: Advance = lambda _: None) -> dict[str, Any]:
    """Return ``rows``: for prefill and a decode step, the median seconds of each copy.

    packed_weights: how many weights were packed. matmul_attention: whether the third copy attends
    by matrix products.
    """
    with _preferring_onednn():
        return _measured(plan, advance)


@contextmanager
def _preferring_onednn() -> Iterator[None]:
    """Have attention use oneDNN where it can be used, though MKL may be faster."""
    with ExitStack() as stack:
        for module in (matmul_attention, matmul_prefill):
            stack.enter_context(patch.object(module, "onednn_is_faster", has_onednn))
        yield


def _measured(plan: OnednnPlan, advance: Advance) -> dict[str, Any]:
    advance("building the models")
    shape = plan.model_shape
    build = partial(shape.build_model, dtype=plan.torch_dtype, device=plan.torch_device)
    models: dict[str, PreTrainedModel] = {
        name: build().requires_grad_(False) for name in (PYTORCH, PACKED, MATMUL)
    }
    packed = [pack_weights(models[name], LEAST_ELEMENTS_AVX512) for name in (PACKED, MATMUL)]
    has_matmul = use_matmul_attention(models[MATMUL])
    ids = torch.arange(plan.prompt_tokens)[None] % shape.vocabulary
    caches = {
        name: model(ids[:, : plan.cached_tokens]).past_key_values for name, model in models.items()
    }

    def prefill(model: PreTrainedModel, _turn: int) -> float:
        began = time.perf_counter()
        model(ids, logits_to_keep=1, use_cache=False)
        return time.perf_counter() - began

    def decode(name: str, _turn: int) -> float:
        began = time.perf_counter()
        models[name](ids[:, :1], past_key_values=caches[name])
        return time.perf_counter() - began

    prefills = {name: partial(prefill, model) for name, model in models.items()}
    decodes = {name: partial(decode, name) for name in models}
    rows = []
    for what, cases, repeat in (
        ("prefill", prefills, plan.repeat),
        ("decode step", decodes, 10 * plan.repeat),
    ):
        runs = run_in_turns(cases, repeat, advance)
        rows.append({"what": what, "seconds": {name: median(runs[name]) for name in cases}})
    return {
        "shape": shape.name,
        "dtype": plan.dtype,
        "prompt_tokens": plan.prompt_tokens,
        "packed_weights": packed[0],
        "matmul_attention": has_matmul,
        "rows": rows,
    }


def show(found: dict[str, Any]) -> None:
    told = {
        row["what"]: ", ".join(f"{name} {taken:.3f} s" for name, taken in row["seconds"].items())
        for row in found["rows"]
    }
    told["weights packed"] = str(found["packed_weights"])
    told["attention by matrix products"] = str(found["matmul_attention"])
    facts(f"{found['shape']}, {found['prompt_tokens']} tokens, {found['dtype']}")(told)


app = benchmark_app(OnednnPlan, measure_onednn, show)

if __name__ == "__main__":
    app()
