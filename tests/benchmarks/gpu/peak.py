"""Measures the most memory that a call holds beyond what there was before it."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import torch

from cacheblend_rag.memory import give_back_unused

_CLEAR = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")
_RESET_PEAK = "5"


def peak_extra_bytes(call: Callable[[], object], device: torch.device) -> int | None:
    """Run ``call`` once and return its peak of additional bytes, None if unmeasurable.

    CUDA: the allocator's own peak, exact to the byte. Linux: the kernel's peak of the process's
    resident memory, reset before the call. That peak counts whole pages, other threads, and pages
    of files that the call maps. It misses memory that the allocator reuses from earlier work, so
    freed memory is first returned to the system.
    """
    gc.collect()
    if device.type == "cuda":
        return _cuda_peak(call, device)
    if _CLEAR.exists():
        return _resident_peak(call)
    return None


def _cuda_peak(call: Callable[[], object], device: torch.device) -> int:
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    torch.cuda.synchronize(device)
    return int(torch.cuda.max_memory_allocated(device)) - before


def _resident_peak(call: Callable[[], object]) -> int | None:
    give_back_unused()
    try:
        _CLEAR.write_text(_RESET_PEAK)
    except OSError:
        return None
    before = _status_bytes("VmRSS")
    call()
    return max(0, _status_bytes("VmHWM") - before)


def _status_bytes(name: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0
