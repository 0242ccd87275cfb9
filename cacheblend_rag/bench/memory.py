"""Measures the peak of additional memory during a call; drops files from the page cache.

CUDA: the allocator's own peak, exact to the byte. Linux: the kernel's peak of the process's
resident memory, reset before the call. That peak counts whole pages, other threads, and pages of
files that the call maps. It misses memory that the allocator reuses from earlier work, so freed
memory is first returned to the system. On other systems memory is not measured.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from cacheblend_rag.errors import CacheBlendError
from cacheblend_rag.memory import give_back_unused

_CLEAR = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")
_RESET_PEAK = "5"


def peak_extra_bytes(call: Callable[[], object], device: torch.device) -> int | None:
    """Run ``call`` once and return its peak of additional bytes, None if unmeasurable."""
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
    _give_back_freed_memory()
    try:
        _CLEAR.write_text(_RESET_PEAK)
    except OSError:
        return None
    before = _status_bytes("VmRSS")
    call()
    return max(0, _status_bytes("VmHWM") - before)


def _give_back_freed_memory() -> None:
    give_back_unused()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _status_bytes(name: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return 0


def drop_from_page_cache(folder: Path) -> None:
    """Drop a folder's files from the page cache, so that the next read waits for the disk.

    Raises CacheBlendError where the system keeps them in memory, as on a tmpfs.
    """
    for path in folder.rglob("*"):
        if not path.is_file():
            continue
        with path.open("rb+") as file:
            os.fsync(file)  # pages that are not written yet stay
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            if _is_cached(file.fileno(), path.stat().st_size):
                raise CacheBlendError(
                    f"cold: the system keeps {path} in memory; set TMPDIR to a folder on a disk"
                )


def _is_cached(file: int, nbytes: int) -> bool:
    """Whether any page of an open file is in the page cache, as ``mincore`` tells."""
    if not nbytes:
        return False
    told = np.empty(-(-nbytes // mmap.PAGESIZE), dtype=np.uint8)
    with mmap.mmap(file, nbytes, prot=mmap.PROT_READ) as mapped:
        at = np.frombuffer(mapped, dtype=np.uint8).ctypes.data_as(ctypes.c_void_p)
        result = told.ctypes.data_as(ctypes.c_void_p)
        failed = ctypes.CDLL(None).mincore(at, ctypes.c_size_t(nbytes), result)
        del at  # it keeps the file mapped
    return bool(failed or (told & 1).any())
