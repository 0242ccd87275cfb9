"""Page-locked memory for chunk KV on the host: a GPU reads it without the host's help.

Each chunk that stays on the host gets pages of its own, which go back to the system with the last
tensor in them. They are never written again, so a forked process may read them.
"""

from __future__ import annotations

import logging
import mmap
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from cacheblend_rag.kv.chunk_kv import ChunkKV

ALIGNMENT = 64
"""Of each tensor in the memory of a chunk, in bytes."""
SHARE = 0.5
"""Limit of page-locked memory for chunks in the host tier, as a share of the machine's memory."""
SLACK_BYTES = 1 << 16
"""Slack for a chunk read from bytes: views of one buffer that also holds the header."""
PORTABLE = 1
"""cudaHostRegisterPortable: page-locked for all devices."""

_LOG = logging.getLogger(__name__)


class Pages(mmap.mmap):
    """An mmap; a subclass, so that its ``weakref.finalize`` runs before it is unmapped."""


class PageLockedMemory:
    """Allocates page-locked memory, up to a limit.

    lock, unlock: of an address and a size; whether that worked. is_there: whether a device uses
    page-locked memory at all, asked each time. limit: maximum total size of what is allocated at
    the same time, in bytes.
    """

    def __init__(
        self,
        lock: Callable[[int, int], bool],
        unlock: Callable[[int], None],
        is_there: Callable[[], bool],
        limit: int,
    ) -> None:
        self._lock_pages, self._unlock_pages, self._is_there = lock, unlock, is_there
        self._limit, self._taken = limit, 0
        self._mutex = threading.Lock()
        # A finalizer may run anywhere, also under the lock: it only notes what is free.
        self._freed: deque[int] = deque()

    @property
    def is_used(self) -> bool:
        """Whether a device uses page-locked memory at all."""
        return self._is_there()

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
        if self._lock_pages(address, nbytes):
            weakref.finalize(pages, self._free, address, nbytes).atexit = False
            return pages
        self._freed.append(nbytes)
        with self._mutex:
            self._limit = self._in_use()  # as much as can be had
        _LOG.warning(
            "only %d MiB of memory could be page-locked: other chunk KV is copied by the host",
            self._limit >> 20,
        )
        return None

    def copied(self, kv: ChunkKV) -> ChunkKV | None:
        """Return a copy of a chunk in page-locked memory; None if there is none for it."""
        sizes: list[int] = []

        def measure(tensor: Tensor) -> Tensor:
            sizes.append(rounded_up(tensor.nbytes, ALIGNMENT))
            return tensor

        kv.mapped(measure)
        if (pages := self.pages(sum(sizes))) is None:
            return None
        free = torch.frombuffer(pages, dtype=torch.uint8)

        def place(tensor: Tensor) -> Tensor:
            nonlocal free
            own, free = free[: tensor.nbytes], free[rounded_up(tensor.nbytes, ALIGNMENT) :]
            return own.view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())

        return kv.mapped(place)

    def _in_use(self) -> int:
        while self._freed:
            self._taken -= self._freed.popleft()
        return self._taken

    def _free(self, address: int, nbytes: int) -> None:
        if self._is_there():  # not in a forked process, nor once CUDA is shut down
            self._unlock_pages(address)
        self._freed.append(nbytes)


def rounded_up(nbytes: int, to: int) -> int:
    """Return the smallest multiple of ``to`` that is not less than ``nbytes``."""
    return -(-nbytes // to) * to


def machine_bytes() -> int:
    """Return the size of the machine's memory in bytes; 0 if it is unknown."""
    return os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE if sys.platform == "linux" else 0


@cache
def cuda_memory() -> PageLockedMemory:
    """Return the memory of this process for chunks that stay on the host; see ``on_cuda``."""
    return on_cuda(int(SHARE * machine_bytes()))


def on_cuda(limit: int) -> PageLockedMemory:
    """Return page-locked memory for the CUDA devices that this process uses. limit: bytes."""
    return PageLockedMemory(_lock, _unlock, _has_context, limit)


def _has_context() -> bool:
    # torch does not type what asks CUDA.
    return torch.cuda.is_initialized() and _device() is not None  # type: ignore[no-untyped-call]


def _device() -> int | None:
    """Return a device that this process computes on; asking begins no work on any device."""
    has_context: Callable[[int], bool] = getattr(torch._C, "_cuda_hasPrimaryContext")  # noqa: B009
    return next(filter(has_context, range(torch.cuda.device_count())), None)


def _lock(address: int, nbytes: int) -> bool:
    with torch.cuda.device(_device()):
        cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        if not int(cudart.cudaHostRegister(address, nbytes, PORTABLE)):
            return True
        try:  # the next operation would raise this error
            torch.zeros(1, device="cuda")
        except RuntimeError:
            _LOG.debug("memory was not page-locked", exc_info=True)
        return False


def _unlock(address: int) -> None:
    with torch.cuda.device(_device()):
        torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
