"""One layer's attention over scattered rows: SDPA, matrix products, FlexAttention, our kernel."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from cacheblend_rag.bench.interleave import Advance, run_in_turns
from cacheblend_rag.bench.plan import ModelPlan, option
from cacheblend_rag.blend.attention import attend_rows
from cacheblend_rag.blend.flex import FlexAttention
from cacheblend_rag.blend.fused import FusedKV
from cacheblend_rag.blend.masks import MaskCache
from cacheblend_rag.blend.matmul_attention import attend_by_matmul
from cacheblend_rag.blend.onednn import has_onednn
from cacheblend_rag.blend.rectangles import attend_by_rectangles, prefers_rectangles
from cacheblend_rag.blend.row_attention import RowAttention
from cacheblend_rag.blend.rows import Rows
from cacheblend_rag.blend.stack import AttentionCall, Geometry
from cacheblend_rag.cli import output
from cacheblend_rag.errors import ConfigError
from tests.benchmarks.command import benchmark_app

TAIL = 32
FULL, SDPA, FLEX, KERNEL = "full prefill", "sdpa", "flex", "kernel"
MATMUL, FULL_MATMUL, RECTANGLES = "matmul", "full prefill, matmul", "rectangles"


@dataclass(frozen=True, kw_only=True)
class AttentionPlan(ModelPlan):
    """One layer's attention over scattered rows: SDPA and others.

    Those are matrix products by oneDNN and rectangles of SDPA's kernel on a CPU, FlexAttention and
    our kernel on CUDA, since they are not compiled elsewhere. The last TAIL tokens, the question,
    are always computed.
    """

    shape: str = option("mistral-7b", "A name of the shapes in cacheblend_rag.bench.")
    tokens: tuple[int, ...] = option((4096,), "Length of a prompt; repeatable.")
    ratio: float = option(0.15, "Share of the tokens that is recomputed.")
    repeat: int = option(5, "Timed runs each; medians are shown.", least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.ratio <= 1:
            raise ConfigError(f"ratio={self.ratio!r} must be above 0 and at most 1")
        for tokens in self.tokens:
            if tokens <= TAIL:
                raise ConfigError(f"tokens={tokens!r} must be above {TAIL}")


def measure_attention(plan: AttentionPlan, advance: Advance = lambda _: None) -> dict[str, Any]:
    """Return medians by length of prompt, and how far kernels differ from each other."""
    return {
        "shape": plan.shape,
        "ratio": plan.ratio,
        "dtype": plan.dtype,
        "device": plan.torch_device.type,
        "repeat": plan.repeat,
        "rows": [_measure(plan, tokens, advance) for tokens in plan.tokens],
    }


@torch.inference_mode()
def _measure(plan: AttentionPlan, tokens: int, advance: Advance) -> dict[str, Any]:
    shape, device, dtype = plan.model_shape, plan.torch_device, plan.torch_dtype
    width = shape.hidden // shape.heads
    draw = torch.Generator(device).manual_seed(0)
    options: dict[str, Any] = {"generator": draw, "dtype": dtype, "device": device}
    query = torch.randn(1, shape.heads, tokens, width, **options)
    keys, values = (torch.randn(1, shape.kv_heads, tokens, width, **options) for _ in range(2))
    geometry = Geometry(1, shape.heads, shape.kv_heads, width, dtype, device)
    fused = FusedKV(geometry, tokens)
    fused.write(0, Rows.at(np.arange(tokens), device), keys, values)
    chosen = random.Random(0).sample(range(tokens - TAIL), round(plan.ratio * (tokens - TAIL)))
    rows = Rows.at(np.array([*sorted(chosen), *range(tokens - TAIL, tokens)]), device)
    call = AttentionCall(0, query[:, :, rows.device], keys, values, width**-0.5)
    given, named = (call.query, keys, values, rows), {"scaling": width**-0.5}
    kernels = {SDPA: partial(attend_rows, *given, **named, masks=MaskCache())}
    everything: dict[str, Callable[[], torch.Tensor]] = {}
    if device.type == "cpu" and has_onednn():
        kernels[MATMUL] = partial(attend_by_matmul, *given, **named, masks=MaskCache())
        every = (query, keys, values, Rows.at(np.arange(tokens), device))
        everything[FULL_MATMUL] = partial(attend_by_matmul, *every, **named)
    if prefers_rectangles(call.query, keys, values, tokens):
        kernels[RECTANGLES] = partial(attend_by_rectangles, *given, **named, masks=MaskCache())
    if device.type == "cuda":
        kernels[FLEX] = partial(FlexAttention(), call, fused, rows)
        kernels[KERNEL] = partial(RowAttention(), call, fused, rows)

    def full() -> torch.Tensor:
        return functional.scaled_dot_product_attention(
            query, keys, values, is_causal=True, enable_gqa=shape.heads != shape.kv_heads
        )

    def timed(kernel: Any, _turn: int) -> float:
        _wait(device)
        started = time.perf_counter()
        kernel()
        _wait(device)
        return time.perf_counter() - started

    everything |= {FULL: full, **kernels}
    cases = {name: partial(timed, kernel) for name, kernel in everything.items()}
    runs = run_in_turns(cases, plan.repeat, lambda what: advance(f"{tokens} tokens, {what}"))
    wanted = full().transpose(1, 2)[:, rows.device].float()
    return {
        "tokens": tokens,
        "computed_rows": len(rows.host),
        "seconds": {name: sorted(run)[len(run) // 2] for name, run in runs.items()},
        "largest_difference": {
            name: float((kernel().float() - wanted).abs().max()) for name, kernel in kernels.items()
        },
    }


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def show(found: dict[str, Any]) -> None:
    for row in found["rows"]:
        rows = f"{row['computed_rows']:,} of {row['tokens']:,} rows"
        output.print_facts(f"one layer of {found['shape']}, {rows}, seconds", row["seconds"])


app = benchmark_app(AttentionPlan, measure_attention, show)

if __name__ == "__main__":
    app()
