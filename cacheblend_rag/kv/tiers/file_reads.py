"""Reads byte ranges of the disk tier's files, by buffered I/O or past the page cache (O_DIRECT).

Reading what is not in the page cache through it takes a processor five times as long as with
O_DIRECT: the system finds a page for each 4 KiB of the file, and copies it. A store that keeps
popular chunks in memory gains little from a second copy there.
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import mmap
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from io import FileIO

import numpy as np
from torch import Tensor

from cacheblend_rag.errors import DamagedChunkError
from cacheblend_rag.kv.layer_wait import BusySeconds
from cacheblend_rag.kv.pages import rounded_up
from cacheblend_rag.kv.read_memory import LEAST_BYTES, OF_PROCESS, read_buffer
from cacheblend_rag.kv.tiers.bytes import room_for

CACHED_SHARE = 0.5
"""What is in the page cache by more than this share is read from there."""
LEAST_RATE = 500e6
"""By default a disk that delivers fewer bytes per second is read through the page cache."""
WINDOW_BYTES = 64 << 20
"""Throughput is compared with LEAST_RATE whenever so many bytes have been read with O_DIRECT."""

_LOG = logging.getLogger(__name__)
_DIRECT = os.O_DIRECT if sys.platform == "linux" else 0
_CACHESTAT = ctypes.c_long(451)
"""Number of the system call ``cachestat``, of Linux 6.5 and later, which libc does not name yet."""
_Span, _Counts = ctypes.c_uint64 * 2, ctypes.c_uint64 * 5
"""Its arguments: offset and length; pages that are cached, and four numbers that are not used."""
_COUNTED = set[int]()
"""Devices whose pages ``cachestat`` has counted. Of others, such as an overlay, it may tell 0."""


class DirectReads:
    """Decides whether a disk is read past the page cache.

    wanted: whether it is; None: as long as it delivers LEAST_RATE that way. A slower disk is worth
    keeping in the page cache. is_on: whether to read so now. Safe to share between threads.
    """

    def __init__(self, wanted: bool | None) -> None:
        self.wanted, self.is_on = wanted, wanted is not False
        self._busy, self._lock = BusySeconds(), threading.Lock()
        self._nbytes, self._since = 0, 0.0

    @contextmanager
    def timed(self, nbytes: int) -> Iterator[None]:
        """Wrap a direct read of ``nbytes``, to measure the disk's throughput.

        Time in which several reads run counts once.
        """
        self._busy.begin()
        try:
            yield
        finally:
            self._busy.end()
            with self._lock:
                self._nbytes += nbytes
                if self._nbytes >= WINDOW_BYTES:
                    self._compare()

    def _compare(self) -> None:
        busy = self._busy.total
        rate, self._nbytes, self._since = self._nbytes / (busy - self._since), 0, busy
        if self.wanted is None and rate < LEAST_RATE:
            self.is_on = False
            _LOG.info("disk reads at %d MB/s with O_DIRECT: now buffered I/O", rate / 1e6)


def read_range(file: FileIO, start: int, nbytes: int, direct: DirectReads) -> Tensor:
    """Read ``nbytes`` of an open file from offset ``start``; returns (nbytes,) uint8.

    The memory is reused once no tensor views it. A range that is not in the page cache is read with
    O_DIRECT if ``direct`` says so and it is possible. Raises OSError, and DamagedChunkError if the
    file is shorter or no chunk can be that large.
    """
    if direct.is_on:
        _advise(file.fileno(), "POSIX_FADV_RANDOM")  # to cache no more than is asked for
        if nbytes >= LEAST_BYTES:
            found = _read_directly(file.fileno(), start, nbytes, direct)
            if found is not None:
                return found
            _advise(file.fileno(), "POSIX_FADV_NORMAL")
    buffer = read_buffer(nbytes)
    raw = room_for(nbytes) if buffer is None else buffer
    if not _fill(file.fileno(), start, raw, nbytes):
        raise DamagedChunkError("was cut short: the file ends before the chunk does")
    return raw


def _read_directly(file: int, start: int, nbytes: int, direct: DirectReads) -> Tensor | None:
    """Read bytes of an open file past the page cache.

    None if most are in the page cache, if there is no buffer, the file is shorter or the process
    forked meanwhile, and if the system, the file system or the disk cannot do it: then reading as
    usual works, or tells what is wrong.
    """
    if not _DIRECT or cached_share(file, start, nbytes) > CACHED_SHARE:
        return None
    skipped = start % mmap.PAGESIZE
    raw = read_buffer(rounded_up(skipped + nbytes, mmap.PAGESIZE), skipped)
    if raw is None:
        return None
    forks, is_filled = OF_PROCESS.pageable.forks, False
    with suppress(OSError):
        fcntl.fcntl(file, fcntl.F_SETFL, _DIRECT)
        with direct.timed(nbytes):
            is_filled = _fill(file, start - skipped, raw, skipped + nbytes)
    # Older kernels may write to the child's copy of a page.
    if is_filled and OF_PROCESS.pageable.forks == forks:
        return raw[skipped : skipped + nbytes]
    fcntl.fcntl(file, fcntl.F_SETFL, 0)
    return None


def _fill(file: int, start: int, raw: Tensor, least: int) -> bool:
    """Read from offset ``start`` until a buffer holds ``least`` bytes; False if the file ends."""
    view, done = raw.numpy().data, 0
    while done < least:
        count = os.preadv(file, [view[done:]], start + done)
        if not count:
            return False
        done += count
    return True


def cached_share(file: int, start: int, nbytes: int) -> float:
    """Return the fraction, 0.0 to 1.0, of a byte range of an open file that is in the page cache.

    1.0 if the system will not say, as of another user's file. Reading to find out, even with
    RWF_NOWAIT, would bring pages in.
    """
    found = os.fstat(file)
    begin = start - start % mmap.PAGESIZE
    size = min(start + nbytes, found.st_size) - begin
    if size <= 0:
        return 0.0
    pages, told = rounded_up(size, mmap.PAGESIZE) // mmap.PAGESIZE, _Counts()
    if sys.platform == "linux":
        failed = _libc().syscall(_CACHESTAT, file, _Span(begin, size), told, 0)
        if not failed and told[0]:
            _COUNTED.add(found.st_dev)
        if not failed and found.st_dev in _COUNTED:
            return float(told[0]) / pages
    return _mapped_share(file, begin, size, pages)


def _mapped_share(file: int, begin: int, size: int, pages: int) -> float:
    """As cached_share, by mapping the file and ``mincore``, which takes ten times as long."""
    told = np.empty(pages, dtype=np.uint8)
    try:
        mapped = mmap.mmap(file, size, prot=mmap.PROT_READ, offset=begin)
    except (OSError, ValueError):
        return 1.0
    with mapped:
        at = np.frombuffer(mapped, dtype=np.uint8).ctypes.data_as(ctypes.c_void_p)
        result = told.ctypes.data_as(ctypes.c_void_p)
        failed = _libc().mincore(at, ctypes.c_size_t(size), result)
        del at  # it keeps the file mapped
    return 1.0 if failed else float((told & 1).mean())


def _advise(file: int, advice: str) -> None:
    with suppress(OSError, AttributeError):  # of a file system; on another system
        os.posix_fadvise(file, 0, 0, getattr(os, advice))


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
