"""Step: copies between host and device memory, the way of all chunk KV."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from cacheblend_rag.bench.gpu.scene import Doing, Row, Scene
from cacheblend_rag.bench.gpu.timing import Work, attempt, gigabytes_per_second, times
from cacheblend_rag.blend.copy_stream import BUFFER_BYTES

REAL_BYTES, TOY_BYTES = 256 << 20, 8 << 20
REPEAT = 5
PRODUCTS = 8


def measure(scene: Scene, doing: Doing) -> Iterator[Row]:
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
    stream: torch.cuda.Stream = torch.cuda.Stream(scene.device)  # type: ignore[no-untyped-call]

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
