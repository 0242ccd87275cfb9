"""Reads the bytes of the disk tier's files, through the page cache or past it (Linux' O_DIRECT).

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
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from io import FileIO

import numpy as np
from torch import Tensor

from cacheblend_rag.errors import DamagedChunkError
from cacheblend_rag.kv.pages import rounded_up
from cacheblend_rag.kv.read_memory import LEAST_BYTES, OF_PROCESS, read_buffer
from cacheblend_rag.kv.tiers.bytes import room_for

CACHED_SHARE = 0.5
"""What is in the page cache by more than this share is read from there."""
LEAST_RATE = 500e6
"""Bytes per second that a disk must deliver to be read past the page cache by default."""
WINDOW_BYTES = 64 << 20
"""Bytes of direct reads between two comparisons with LEAST_RATE."""

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
    keeping in the page cache. Safe to share between threads.
    """

    def __init__(self, wanted: bool | None) -> None:
        self.wanted = wanted
        self._is_on, self._lock = wanted is not False, threading.Lock()
        self._under_way, self._since, self._seconds, self._nbytes = 0, 0.0, 0.0, 0

    @property
    def is_on(self) -> bool:
        """Whether to read past the page cache."""
        return self._is_on

    @contextmanager
    def timed(self, nbytes: int) -> Iterator[None]:
        """Wrap a direct read of so many bytes, to measure the rate of all that run at once."""
        with self._lock:
            if not self._under_way:
                self._since = time.perf_counter()
            self._under_way += 1
        try:
            yield
        finally:
            with self._lock:
                self._under_way -= 1
                self._nbytes += nbytes
                if not self._under_way:
                    self._seconds += time.perf_counter() - self._since
                    self._compare()

    def _compare(self) -> None:
        if self._nbytes < WINDOW_BYTES:
            return
        rate, self._nbytes, self._seconds = self._nbytes / self._seconds, 0, 0.0
        if self.wanted is None and rate < LEAST_RATE:
            self._is_on = False
            _LOG.info("the disk delivers %d MB/s: it is read through the page cache", rate / 1e6)


def read_range(file: FileIO, start: int, nbytes: int, direct: DirectReads) -> Tensor:
    """Read bytes of an open file, (nbytes,) uint8.

    Their memory is reused once no tensor views it. What is not in the page cache is read past it if
    ``direct`` says so and it is possible. Raises OSError, and DamagedChunkError if the file is
    shorter or no chunk can be that large.
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
    file.seek(start)
    left = raw.numpy().data
    while left:
        count = file.readinto(left)
        if not count:
            raise DamagedChunkError("was cut short")
        left = left[count:]
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
    forks, is_filled = OF_PROCESS.forks, False
    with suppress(OSError):
        fcntl.fcntl(file, fcntl.F_SETFL, _DIRECT)
        with direct.timed(nbytes):
            is_filled = _fill(file, start - skipped, raw, skipped + nbytes)
    # Older kernels may write to the child's copy of a page.
    if is_filled and OF_PROCESS.forks == forks:
        return raw[skipped : skipped + nbytes]
    fcntl.fcntl(file, fcntl.F_SETFL, 0)
    return None


def _fill(file: int, start: int, raw: Tensor, least: int) -> bool:
    """Fill a buffer from a file; returns whether it had at least so many bytes."""
    view, done = raw.numpy().data, 0
    while done < least:
        count = os.preadv(file, [view[done:]], start + done)
        if not count:
            return False
        done += count
    return True


def cached_share(file: int, start: int, nbytes: int) -> float:
    """Return which share of some bytes of an open file is in the page cache.

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
