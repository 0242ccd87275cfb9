"""Buffers that chunks are read into from disk, which are reused.

New memory costs a page fault per 4 KiB, half as much processor time as reading into it, on
processors that the pass computes on. Where a GPU is used buffers are page-locked, which takes even
longer: the GPU reads chunks where they were read to, and no thread of the host copies them first.
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
from cacheblend_rag.kv.page_locked import on_cuda
from cacheblend_rag.kv.pages import LimitedPages, Pages, machine_bytes

LEAST_BYTES = 1 << 19
"""Reads of fewer bytes get newly allocated memory in place of a buffer."""
MOST_BYTES = 64 << 20
"""So do reads of more: a few buffers of that size would use up the limit."""
GPU_ALIGNMENT = 16
"""Address alignment, in bytes, of chunk KV for full-width (16-byte) loads by a GPU."""
SHARE, LIMIT_BYTES = 1 / 16, 2 << 30
"""Maximum total size of a process's page-locked read buffers, used and unused: this fraction of the
machine's memory, or this many bytes if that is less."""
PAGEABLE_SHARE, PAGEABLE_LIMIT_BYTES = 1 / 64, 256 << 20
"""The same for its pageable read buffers."""


@dataclass(frozen=True, slots=True, eq=False)
class _Buffer:
    """A buffer. forks: how often the process had forked when it was last handed out."""

    pages: Pages
    forks: int


class ReadMemory:
    """A pool of read buffers: each is reused once no tensor refers to its memory.

    memory: allocates them; its limit is that of the pool. forks: how often the process has forked.
    Buffers are page-aligned, and larger than what is read into them, so that memory tiers copy
    chunks out of them (see ``compact``).

    Buffers that were there before the process forked are not reused: on older kernels, memory that
    is written to while a forked process lives may no longer be the memory that the device reads.
    """

    def __init__(self, memory: LimitedPages) -> None:
        self._memory = memory
        self._mutex = threading.Lock()
        self._free: list[_Buffer] = []
        # A finalizer may run anywhere, also under the lock: it only notes what is free.
        self._returned: deque[_Buffer] = deque()
        self.forks = 0

    @property
    def is_used(self) -> bool:
        """Whether reads should use this pool now: one of page-locked memory only beside a GPU."""
        return self._memory.is_used

    def room(self, nbytes: int) -> Tensor | None:
        """Return a buffer, (nbytes,) uint8, of any content.

        None for too few or too many bytes, beyond the limit, and if such memory is of no use.
        """
        if not LEAST_BYTES <= nbytes <= MOST_BYTES or not self.is_used:
            return None
        wanted = nbytes + SLACK_BYTES + mmap.PAGESIZE
        pages = self._take_free(wanted) or self._memory.pages(wanted)
        while pages is None and self._fits(wanted) and self._drop_smallest():
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
        self.forks += 1

    def _take_free(self, nbytes: int) -> Pages | None:
        """Return the smallest free buffer of at least so many bytes, and at most twice as many."""
        with self._mutex:
            unusable = self._collect()
            fitting = [one for one in self._free if nbytes <= len(one.pages) <= 2 * nbytes]
            found = min(fitting, key=lambda one: len(one.pages), default=None)
            if found is not None:
                self._free.remove(found)
        del unusable  # freed here, and not while others wait
        return None if found is None else found.pages

    def _collect(self) -> list[_Buffer]:
        """Move returned buffers to the free list; the caller holds the lock.

        Returns those that were handed out before a fork, which must not be reused.
        """
        while self._returned:
            self._free.append(self._returned.popleft())
        unusable = [one for one in self._free if one.forks != self.forks]
        self._free = [one for one in self._free if one.forks == self.forks]
        return unusable

    def _fits(self, nbytes: int) -> bool:
        """Whether ``nbytes`` fit within the limit once all unused buffers are deallocated."""
        with self._mutex:
            free = sum(len(one.pages) for one in self._free)
        return self._memory.fits(nbytes, free)

    def _drop_smallest(self) -> bool:
        """Deallocate the smallest unused buffer; returns False if no buffer is unused."""
        with self._mutex:
            smallest = min(self._free, key=lambda one: len(one.pages), default=None)
            if smallest is not None:
                self._free.remove(smallest)
        return smallest is not None

    def _lent(self, pages: Pages) -> Tensor:
        """Return a buffer as (bytes,) uint8; it comes back with the last tensor in it."""
        lent = np.frombuffer(pages, dtype=np.uint8)
        buffer = _Buffer(pages, self.forks)
        weakref.finalize(lent, self._returned.append, buffer).atexit = False
        return torch.from_numpy(lent)


def _locked() -> ReadMemory:
    return ReadMemory(on_cuda(min(int(SHARE * machine_bytes()), LIMIT_BYTES)))


def _pageable() -> ReadMemory:
    limit = min(int(PAGEABLE_SHARE * machine_bytes()), PAGEABLE_LIMIT_BYTES)
    return ReadMemory(LimitedPages(limit))


class _OfProcess:
    """The buffers of a process; a forked process begins without any."""

    def __init__(self) -> None:
        self.locked, self.pageable = _locked(), _pageable()
        os.register_at_fork(before=self._forking, after_in_child=self._forked)

    def _forking(self) -> None:
        self.locked.forking()
        self.pageable.forking()

    def _forked(self) -> None:
        # A thread of the parent may have held the locks of the others.
        self.locked, self.pageable = _locked(), _pageable()


OF_PROCESS = _OfProcess()
"""The buffers of this process: page-locked ones for CUDA devices that it uses, and others."""


def read_buffer(nbytes: int, start: int = 0) -> Tensor | None:
    """Return a buffer of this process to read into; page-locked where a GPU is to read it.

    start: where in it the chunk's bytes will begin. As ``ReadMemory.room``; also None where a GPU
    could not read them at its full rate.
    """
    if start % GPU_ALIGNMENT and OF_PROCESS.locked.is_used:
        return None
    locked = OF_PROCESS.locked.room(nbytes)
    return OF_PROCESS.pageable.room(nbytes) if locked is None else locked


def release_read_buffers() -> int:
    """Deallocate this process's unused read buffers; returns how many bytes that frees."""
    return OF_PROCESS.locked.release() + OF_PROCESS.pageable.release()
