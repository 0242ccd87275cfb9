"""Seconds of one layer's attention over a blend's scattered rows, kernel by kernel."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from cacheblend_rag.bench.interleave import Advance, run_in_turns
from cacheblend_rag.bench.shapes import ModelShape
from cacheblend_rag.blend.flex import FlexAttention
from cacheblend_rag.blend.fused import FusedKV
from cacheblend_rag.blend.passes import attend_fused
from cacheblend_rag.blend.rows import Rows
from cacheblend_rag.blend.stack import AttentionCall, Geometry
from cacheblend_rag.errors import ConfigError

TAIL = 32
FULL, SDPA, FLEX = "full prefill", "sdpa", "flex"


@dataclass(frozen=True)
class AttentionPlan:
    """One layer of ``shape``, for prompts of so many ``tokens``, of which ``ratio`` is recomputed.

    The last TAIL tokens, the question, are always computed. FlexAttention runs on CUDA only: it is
    not compiled elsewhere.
    """

    shape: ModelShape
    tokens: Sequence[int]
    ratio: float
    dtype: torch.dtype
    device: torch.device
    repeat: int = 5

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise ConfigError(f"ratio={self.ratio!r} must be above 0 and at most 1")
        for tokens in self.tokens:
            if tokens <= TAIL:
                raise ConfigError(f"tokens={tokens!r} must be above {TAIL}")


def measure_attention(plan: AttentionPlan, advance: Advance = lambda _: None) -> dict[str, Any]:
    """Return medians by length of prompt, and how far kernels differ from each other."""
    return {
        "shape": plan.shape.name,
        "ratio": plan.ratio,
        "dtype": str(plan.dtype).removeprefix("torch."),
        "device": plan.device.type,
        "repeat": plan.repeat,
        "rows": [_measure(plan, tokens, advance) for tokens in plan.tokens],
    }


@torch.inference_mode()
def _measure(plan: AttentionPlan, tokens: int, advance: Advance) -> dict[str, Any]:
    shape, device = plan.shape, plan.device
    width = shape.hidden // shape.heads
    draw = torch.Generator(device).manual_seed(0)
    options: dict[str, Any] = {"generator": draw, "dtype": plan.dtype, "device": device}
    query = torch.randn(1, shape.heads, tokens, width, **options)
    keys, values = (torch.randn(1, shape.kv_heads, tokens, width, **options) for _ in range(2))
    geometry = Geometry(1, shape.heads, shape.kv_heads, width, plan.dtype, device)
    fused = FusedKV(geometry, tokens)
    fused.write(0, Rows.at(np.arange(tokens), device), keys, values)
    chosen = random.Random(0).sample(range(tokens - TAIL), round(plan.ratio * (tokens - TAIL)))
    rows = Rows.at(np.array([*sorted(chosen), *range(tokens - TAIL, tokens)]), device)
    call = AttentionCall(0, query[:, :, rows.device], keys, values, width**-0.5)
    kernels = {SDPA: partial(attend_fused, call, fused, rows)}
    if device.type == "cuda":
        kernels[FLEX] = partial(FlexAttention(), call, fused, rows)

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

    cases = {name: partial(timed, kernel) for name, kernel in {FULL: full, **kernels}.items()}
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
