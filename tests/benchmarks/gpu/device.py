"""Steps: copies between host and device memory, the way of all chunk KV, and a layer's product."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from cacheblend_rag.blend.copy_stream import BUFFER_BYTES
from tests.benchmarks.gpu.scene import Doing, Row, Scene
from tests.benchmarks.gpu.timing import Work, attempt, gigabytes_per_second, times

REAL_BYTES, TOY_BYTES = 256 << 20, 8 << 20
REPEAT = 5
PRODUCTS = 8
REAL_ROWS = (1, 32, 64, 128, 205, 410, 820, 1229, 2458, 8192)
TOY_ROWS = (1, 8)
PRODUCT_REPEAT = 20


def measure_link(scene: Scene, doing: Doing) -> Iterator[Row]:
    """Yield the speed of each way; bytes are counted once."""
    nbytes = scene.pick(REAL_BYTES, TOY_BYTES)
    pageable = torch.ones(nbytes, dtype=torch.uint8)
    there = torch.empty(nbytes, dtype=torch.uint8, device=scene.device)
    other = torch.empty_like(there)
    doing("page-locking memory")
    began = time.perf_counter()
    pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    seconds = time.perf_counter() - began
    yield {"way": "page-locking", "gb_s": gigabytes_per_second(nbytes, 1e3 * seconds)}
    ways: dict[str, Work] = {
        "memory to page-locked": lambda: pinned.copy_(pageable),
        "pageable to device": lambda: there.copy_(pageable),
        "page-locked to device": lambda: there.copy_(pinned, non_blocking=True),
        f"page-locked to device, {BUFFER_BYTES >> 20} MiB each": _in_parts(there, pinned),
        "device to page-locked": lambda: pinned.copy_(there, non_blocking=True),
        "device to pageable": lambda: pageable.copy_(there),
        "device to device": lambda: other.copy_(there),
    }
    for way, work in ways.items():
        doing(way)
        yield attempt({"way": way}, _speed(scene, work, nbytes))
    doing("file in the page cache to device")
    with tempfile.TemporaryDirectory(prefix="cacheblend-gpu-") as folder:
        mapped = _mapped(Path(folder, "mapped"), nbytes)
        yield attempt(
            {"way": "file in the page cache to device"},
            _speed(scene, lambda: there.copy_(mapped), nbytes),
        )
    doing("a copy beside products")
    yield from _beside(scene, there, pinned)


def _speed(scene: Scene, work: Work, nbytes: int) -> Callable[[], Row]:
    def measured() -> Row:
        taken = times(scene.device, [work] * REPEAT, warm=1)
        return {**taken, "gb_s": gigabytes_per_second(nbytes, taken["ms"])}

    return measured


def _in_parts(there: Tensor, pinned: Tensor) -> Work:
    """Copy as passes do: one buffer after the other."""

    def work() -> None:
        for start in range(0, pinned.numel(), BUFFER_BYTES):
            here = slice(start, start + BUFFER_BYTES)
            there[here].copy_(pinned[here], non_blocking=True)

    return work


def _mapped(path: Path, nbytes: int) -> Tensor:
    path.write_bytes(bytes(nbytes))
    return torch.from_file(str(path), shared=True, size=nbytes, dtype=torch.uint8)


def _beside(scene: Scene, there: Tensor, pinned: Tensor) -> Iterator[Row]:
    """Yield how long products take alone, and while another stream copies."""
    side = scene.pick(8192, 256)
    square = scene.random(side, side)
    stream: torch.cuda.Stream = torch.cuda.Stream(scene.device)

    def products() -> None:
        for _ in range(PRODUCTS):
            square @ square

    def both() -> None:
        with torch.cuda.stream(stream):
            there.copy_(pinned, non_blocking=True)
        products()

    for way, work in (("alone", products), ("while a copy runs", both)):
        row = {"way": f"{PRODUCTS} products of {side} x {side}, {way}"}
        yield attempt(row, partial(times, scene.device, [work] * REPEAT, warm=1))


@torch.inference_mode()
def measure_products(scene: Scene, doing: Doing) -> Iterator[Row]:
    """Yield the rate for each number of rows, in 10^12 operations per second."""
    of = scene.dimensions
    weight = scene.random(2 * of.intermediate, of.hidden)
    for rows in scene.pick(REAL_ROWS, TOY_ROWS):
        doing(f"{rows} rows")
        work: Work = partial(functional.linear, scene.random(rows, of.hidden), weight)

        def measured(rows: int = rows, work: Work = work) -> Row:
            taken = times(scene.device, [work] * PRODUCT_REPEAT, warm=3)
            operations = 2 * rows * weight.numel()
            return {**taken, "tflops": round(operations / taken["ms"] / 1e9, 3)}

        yield attempt({"rows": rows}, measured)
