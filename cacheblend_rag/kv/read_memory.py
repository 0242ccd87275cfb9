"""Page-locked buffers that chunks are read into from disk, for a GPU.

The GPU reads chunks where they were read to: no thread of the host copies them into page-locked
memory first. Buffers are reused, since locking memory takes longer than reading into it.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections import deque
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cacheblend_rag.kv.compact import SLACK_BYTES
from cacheblend_rag.kv.page_locked import PageLockedMemory, Pages, machine_bytes, on_cuda

LEAST_BYTES = 1 << 19
"""Smallest read, in bytes, that gets a page-locked buffer; others use pageable memory."""
MOST_BYTES = 64 << 20
"""Largest read, in bytes, that gets one: a few larger ones would use up the limit."""
SHARE, LIMIT_BYTES = 1 / 16, 2 << 30
"""Limits of all read buffers of a process, in use or free: a share of the machine's memory, and a
size in bytes. The smaller one applies."""


@dataclass(frozen=True, slots=True, eq=False)
class _Buffer:
    """A page-locked buffer. forks: how often the process had forked when it was last handed out."""

    pages: Pages
    forks: int


class ReadMemory:
    """Page-locked buffers, each of which is reused once no tensor refers to it.

    memory: what they are made of; its limit is that of all buffers. Buffers are larger than what
    is read into them, so that memory tiers copy chunks out of them (see ``compact``).

    Buffers that were there before the process forked are not reused: on older kernels, memory that
    is written to while a forked process lives may no longer be the memory that the device reads.
    """

    def __init__(self, memory: PageLockedMemory) -> None:
        self._memory = memory
        self._mutex = threading.Lock()
        self._free: list[_Buffer] = []
        # A finalizer may run anywhere, also under the lock: it only notes what is free.
        self._returned: deque[_Buffer] = deque()
        self._forks = 0

    def room(self, nbytes: int) -> Tensor | None:
        """Return a buffer, (nbytes,) uint8, of any content.

        None if no device uses page-locked memory, for too few or too many bytes, and beyond the
        limit.
        """
        if not LEAST_BYTES <= nbytes <= MOST_BYTES or not self._memory.is_used:
            return None
        wanted = nbytes + SLACK_BYTES + mmap.PAGESIZE
        pages = self._take_free(wanted) or self._memory.pages(wanted)
        while pages is None and self._drop_smallest():
            pages = self._memory.pages(wanted)
        return None if pages is None else self._lent(pages)[:nbytes]

    def release(self) -> int:
        """Free the buffers that are not in use; returns their size in bytes."""
        with self._mutex:
            unusable = self._collect()
            free, self._free = self._free, []
        return sum(len(buffer.pages) for buffer in (*free, *unusable))

    def forking(self) -> None:
        """Note that this process is about to fork."""
        self._forks += 1

    def _take_free(self, nbytes: int) -> Pages | None:
        """Return the smallest free buffer of at least so many bytes, and at most twice as many."""
        with self._mutex:
            unusable = self._collect()
            fitting = [one for one in self._free if nbytes <= len(one.pages) <= 2 * nbytes]
            found = min(fitting, key=lambda one: len(one.pages), default=None)
            if found is not None:
                self._free.remove(found)
        del unusable  # unlocked here, and not while others wait
        return None if found is None else found.pages

    def _collect(self) -> list[_Buffer]:
        """Move returned buffers to the free list; the caller holds the lock.

        Returns those that were handed out before a fork, which must not be reused.
        """
        while self._returned:
            self._free.append(self._returned.popleft())
        unusable = [one for one in self._free if one.forks != self._forks]
        self._free = [one for one in self._free if one.forks == self._forks]
        return unusable

    def _drop_smallest(self) -> bool:
        """Unlock the smallest free buffer; returns whether there was one."""
        with self._mutex:
            smallest = min(self._free, key=lambda one: len(one.pages), default=None)
            if smallest is not None:
                self._free.remove(smallest)
        return smallest is not None

    def _lent(self, pages: Pages) -> Tensor:
        """Return a buffer as (bytes,) uint8; it comes back with the last tensor in it."""
        lent = np.frombuffer(pages, dtype=np.uint8)
        buffer = _Buffer(pages, self._forks)
        weakref.finalize(lent, self._returned.append, buffer).atexit = False
        return torch.from_numpy(lent)


_CUDA = ReadMemory(on_cuda(min(int(SHARE * machine_bytes()), LIMIT_BYTES)))
os.register_at_fork(before=_CUDA.forking)


def cuda_read_memory() -> ReadMemory:
    """Return the buffers of this process, which are for CUDA devices that it uses."""
    return _CUDA
