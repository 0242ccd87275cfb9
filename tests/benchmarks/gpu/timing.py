"""Times work on a device: until the host has queued it, and until the device has done it."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch

from cacheblend_rag.blend.passes import synchronize
from tests.benchmarks.gpu.scene import Row

Work = Callable[[], Any]
DIGITS = 4


def times(device: torch.device, calls: Sequence[Work], *, warm: int = 0) -> Row:
    """Return the medians of calls, in milliseconds.

    warm: how often the first of them is run before, untimed. ``ms``: until the device is done.
    ``host_ms``: until the host has queued the work.
    """
    for _ in range(warm):
        calls[0]()
    whole, host = [], []
    for call in calls:
        synchronize(device)
        began = time.perf_counter()
        call()
        queued = time.perf_counter()
        synchronize(device)
        whole.append(time.perf_counter() - began)
        host.append(queued - began)
    return {"ms": milliseconds(median(whole)), "host_ms": milliseconds(median(host))}


def milliseconds(seconds: float) -> float:
    """Return seconds as milliseconds, rounded."""
    return round(1e3 * seconds, DIGITS)


def gigabytes_per_second(nbytes: int, ms: float) -> float:
    """Return the speed of moving so many bytes in so many milliseconds."""
    return round(nbytes / ms / 1e6, 2)


def attempt(row: Row, measure: Callable[[], Row]) -> Row:
    """Return a row with what ``measure`` returns, or with why it failed: other cases go on."""
    try:
        return {**row, **measure()}
    except Exception as error:  # whatever a kernel, a driver or a lack of memory raises
        failed = told(error)
    gc.collect()  # what the failed case held
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return {**row, "failed": failed}


def told(error: BaseException) -> str:
    """Return an error as one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
