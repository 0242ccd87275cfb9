"""Page-locked buffers that chunks are read into from disks and object stores, for a GPU.

The GPU reads chunks where they were read to: no thread of the host copies them into page-locked
memory first. Buffers are reused, since locking memory takes longer than reading into it.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
import weakref
from collections import deque
from functools import cache

import numpy as np
import torch
from torch import Tensor

from cacheblend_rag.kv.compact import SLACK_BYTES
from cacheblend_rag.kv.page_locked import PageLockedMemory, Pages, machine_bytes, on_cuda

LEAST_BYTES = 1 << 19
"""Smaller reads get ordinary memory: such chunks go through the buffers of the copy stream."""
MOST_BYTES = 64 << 20
"""Larger reads get ordinary memory, too, so that few of them do not take all there is."""
SHARE = 1 / 16
"""Most memory in buffers, in use or not, as a share of the machine's."""


class ReadMemory:
    """Page-locked buffers, each of which is reused once no tensor refers to it.

    memory: what they are made of; its limit is that of all buffers. Buffers are larger than what
    is read into them, so that memory tiers copy chunks out of them (see ``compact``).
    """

    def __init__(self, memory: PageLockedMemory) -> None:
        self._memory = memory
        self._mutex = threading.Lock()
        self._free: list[Pages] = []
        # A finalizer may run anywhere, also under the lock: it only notes what is free.
        self._returned: deque[tuple[Pages, int]] = deque()
        self._forks = 0

    def room(self, nbytes: int) -> Tensor | None:
        """Return a buffer, (nbytes,) uint8, of any content.

        None if no device uses page-locked memory, for too few or too many bytes, and beyond the
        limit.
        """
        if not LEAST_BYTES <= nbytes <= MOST_BYTES or not self._memory.is_used:
            return None
        wanted = nbytes + SLACK_BYTES + mmap.PAGESIZE
        pages = self._taken(wanted) or self._memory.pages(wanted)
        if pages is None and self.release():  # buffers of other sizes
            pages = self._memory.pages(wanted)
        return None if pages is None else self._lent(pages)[:nbytes]

    def release(self) -> int:
        """Unlock the buffers that are not in use; returns their bytes."""
        with self._mutex:
            self._collect()
            free, self._free = self._free, []
        return sum(map(len, free))

    def forking(self) -> None:
        """Note that this process is about to fork: no buffer of before is written to again.

        On kernels before Linux 5.9, memory that is written to while the child lives is no longer
        what the device reads.
        """
        self._forks += 1

    def _taken(self, nbytes: int) -> Pages | None:
        """Return the smallest free buffer of at least so many bytes, and at most twice as many."""
        with self._mutex:
            self._collect()
            fitting = [pages for pages in self._free if nbytes <= len(pages) <= 2 * nbytes]
            if not fitting:
                return None
            found = min(fitting, key=len)
            self._free = [pages for pages in self._free if pages is not found]
            return found

    def _collect(self) -> None:
        while self._returned:
            pages, forks = self._returned.popleft()
            if forks == self._forks:
                self._free.append(pages)

    def _lent(self, pages: Pages) -> Tensor:
        """Return a buffer as (bytes,) uint8; it comes back with the last tensor in it."""
        lent = np.frombuffer(pages, dtype=np.uint8)
        weakref.finalize(lent, self._returned.append, (pages, self._forks)).atexit = False
        return torch.from_numpy(lent)


@cache
def cuda_read_memory() -> ReadMemory:
    """Return the buffers of this process, which are for CUDA devices that it uses."""
    memory = ReadMemory(on_cuda(int(SHARE * machine_bytes())))
    if sys.platform != "win32":
        os.register_at_fork(before=memory.forking)
    return memory
