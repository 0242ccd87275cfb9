"""Allocates anonymous memory maps (mmap) up to a total size."""

from __future__ import annotations

import mmap
import os
import sys
import threading
import weakref
from collections import deque
from contextlib import suppress

import torch


class Pages(mmap.mmap):
    """An mmap; a subclass, so that its ``weakref.finalize`` runs before it is unmapped."""


class LimitedPages:
    """Allocates anonymous memory maps, backed by transparent huge pages where the system has them.

    limit: maximum total size of those allocated at the same time, in bytes.
    """

    def __init__(self, limit: int) -> None:
        self._limit, self._taken = limit, 0
        self._mutex = threading.Lock()
        # A finalizer may run anywhere, also under the lock: it only notes what is free.
        self._freed: deque[int] = deque()

    @property
    def is_used(self) -> bool:
        """Whether to allocate at all in this process now; subclasses may say no."""
        return True

    @property
    def nbytes(self) -> int:
        """Bytes in use now."""
        with self._mutex:
            return self._in_use()

    def fits(self, nbytes: int, freed: int) -> bool:
        """Whether so many bytes are within the limit once ``freed`` of those in use are not."""
        return self.nbytes - freed + rounded_up(nbytes, mmap.PAGESIZE) <= self._limit

    def pages(self, nbytes: int) -> Pages | None:
        """Return pages of at least so many bytes, which go back once nothing refers to them.

        None if they are of no use, beyond the limit, or if there are none.
        """
        if not self.is_used:
            return None
        nbytes = rounded_up(nbytes, mmap.PAGESIZE)
        with self._mutex:
            if self._in_use() + nbytes > self._limit:
                return None
            self._taken += nbytes
        try:
            pages = Pages(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError):
            self._freed.append(nbytes)
            return None
        address = torch.frombuffer(pages, dtype=torch.uint8).data_ptr()
        if self._prepare(pages, address):
            weakref.finalize(pages, self._free, address, nbytes).atexit = False
            return pages
        self._freed.append(nbytes)
        with self._mutex:
            self._limit = self._in_use()  # as much as can be had
        return None

    def _prepare(self, pages: Pages, address: int) -> bool:
        """Make new pages what they are for; returns whether that worked."""
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):
                pages.madvise(mmap.MADV_HUGEPAGE)
        return True

    def _undo(self, address: int) -> None:
        """Undo ``_prepare`` before pages go back."""

    def _in_use(self) -> int:
        while self._freed:
            self._taken -= self._freed.popleft()
        return self._taken

    def _free(self, address: int, nbytes: int) -> None:
        self._undo(address)
        self._freed.append(nbytes)


def rounded_up(nbytes: int, to: int) -> int:
    """Return the smallest multiple of ``to`` that is not less than ``nbytes``."""
    return -(-nbytes // to) * to


def machine_bytes() -> int:
    """Return the size of the machine's memory in bytes; 0 if it is unknown."""
    return os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE if sys.platform == "linux" else 0
