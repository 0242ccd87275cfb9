"""Page-locked buffers that chunks are read into from disk where a GPU is used, which are reused.

The GPU reads chunks where they were read to, and no thread of the host copies them first. Locking
memory takes longer than reading into it.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from collections import deque

import numpy as np
import torch
from torch import Tensor

from cacheblend_rag.kv.page_locked import (
    SLACK_BYTES,
    PageLockedMemory,
    Pages,
    machine_bytes,
    on_cuda,
)

LEAST_BYTES = 1 << 19
"""Reads of fewer bytes get newly allocated memory in place of a buffer."""
MOST_BYTES = 64 << 20
"""So do reads of more: a few buffers of that size would use up the limit."""
SHARE, LIMIT_BYTES = 1 / 16, 2 << 30
"""Maximum total size of a process's read buffers, used and unused: this fraction of the machine's
memory, or this many bytes if that is less."""


class ReadMemory:
    """A pool of read buffers: each is reused once no tensor refers to its memory.

    memory: allocates them; its limit is that of the pool. Buffers are page-aligned, and larger than
    what is read into them, so that memory tiers copy chunks out of them (see ``compact``).
    """

    def __init__(self, memory: PageLockedMemory) -> None:
        self._memory = memory
        self._mutex = threading.Lock()
        self._free: list[Pages] = []
        # A finalizer may run anywhere, also under the lock: it only notes what is free.
        self._returned: deque[Pages] = deque()

    def room(self, nbytes: int) -> Tensor | None:
        """Return a buffer, (nbytes,) uint8, of any content.

        None for too few or too many bytes, beyond the limit, and if no GPU is used.
        """
        if not LEAST_BYTES <= nbytes <= MOST_BYTES or not self._memory.is_used:
            return None
        wanted = nbytes + SLACK_BYTES + mmap.PAGESIZE
        pages = self._take_free(wanted) or self._new(wanted)
        while pages is None and self._fits(wanted) and self._drop_smallest():
            pages = self._new(wanted)
        return None if pages is None else self._lent(pages)[:nbytes]

    def release(self) -> int:
        """Free the buffers that are not in use; returns their size in bytes."""
        if not self._memory.is_used:  # also in a forked process, where the lock may be held
            return 0
        with self._mutex:
            self._collect()
            free, self._free = self._free, []
        return sum(map(len, free))

    def _new(self, nbytes: int) -> Pages | None:
        """Return new pages, which a forked process does not share.

        On older kernels, memory that is written to while a forked process shares it may no longer
        be the memory that the device reads.
        """
        pages = self._memory.pages(nbytes)
        if pages is not None and hasattr(mmap, "MADV_DONTFORK"):
            pages.madvise(mmap.MADV_DONTFORK)
        return pages

    def _take_free(self, nbytes: int) -> Pages | None:
        """Return the smallest free buffer of at least so many bytes, and at most twice as many."""
        with self._mutex:
            self._collect()
            fitting = [pages for pages in self._free if nbytes <= len(pages) <= 2 * nbytes]
            found = min(fitting, key=len, default=None)
            if found is not None:
                self._free.remove(found)
        return found

    def _collect(self) -> None:
        """Move returned buffers to the free list; the caller holds the lock."""
        while self._returned:
            self._free.append(self._returned.popleft())

    def _fits(self, nbytes: int) -> bool:
        """Whether ``nbytes`` fit within the limit once all unused buffers are deallocated."""
        with self._mutex:
            free = sum(map(len, self._free))
        return self._memory.fits(nbytes, free)

    def _drop_smallest(self) -> bool:
        """Deallocate the smallest unused buffer; returns False if no buffer is unused."""
        with self._mutex:
            smallest = min(self._free, key=len, default=None)
            if smallest is not None:
                self._free.remove(smallest)
        return smallest is not None

    def _lent(self, pages: Pages) -> Tensor:
        """Return a buffer as (bytes,) uint8; it comes back with the last tensor in it."""
        lent = np.frombuffer(pages, dtype=np.uint8)
        weakref.finalize(lent, self._returned.append, pages).atexit = False
        return torch.from_numpy(lent)


OF_PROCESS = ReadMemory(on_cuda(min(int(SHARE * machine_bytes()), LIMIT_BYTES)))
"""The buffers of this process, for the CUDA devices that it uses."""
