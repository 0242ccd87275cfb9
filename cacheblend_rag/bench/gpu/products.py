"""Step: a layer's largest matrix product, by rows: how far few rows use the device."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch.nn import functional

from cacheblend_rag.bench.gpu.scene import Doing, Row, Scene
from cacheblend_rag.bench.gpu.timing import Work, attempt, times

REAL_ROWS = (1, 32, 64, 128, 205, 410, 820, 1229, 2458, 8192)
TOY_ROWS = (1, 8)
REPEAT = 20


@torch.inference_mode()
def measure(scene: Scene, doing: Doing) -> Iterator[Row]:
    """Yield the rate for each number of rows, in 10^12 operations per second."""
    of = scene.dimensions
    weight = scene.random(2 * of.intermediate, of.hidden)
    for rows in scene.pick(REAL_ROWS, TOY_ROWS):
        doing(f"{rows} rows")
        work: Work = partial(functional.linear, scene.random(rows, of.hidden), weight)

        def measured(rows: int = rows, work: Work = work) -> Row:
            taken = times(scene.device, [work] * REPEAT, warm=3)
            operations = 2 * rows * weight.numel()
            return {**taken, "tflops": round(operations / taken["ms"] / 1e9, 3)}

        yield attempt({"rows": rows}, measured)
