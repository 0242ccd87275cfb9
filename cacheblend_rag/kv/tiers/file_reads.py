"""Reads the bytes of the disk tier's files, through the page cache or past it (Linux' O_DIRECT).

Reading what is not in the page cache through it takes a processor five times as long: the system
finds a page for each 4 KiB of the file, and copies it. A store that keeps popular chunks in memory
gains little from a second copy there.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from contextlib import suppress
from functools import cache
from io import FileIO

import numpy as np
from torch import Tensor

from cacheblend_rag.errors import DamagedChunkError
from cacheblend_rag.kv.read_memory import read_buffer
from cacheblend_rag.kv.tiers.bytes import room_for

BLOCK_BYTES = mmap.PAGESIZE
"""Direct reads begin and end at multiples of it, in the file and in memory."""
LEAST_BYTES = 1 << 19
"""Smallest read, in bytes, that is worth reading directly."""
CACHED_SHARE = 0.5
"""What is in the page cache by more than this share is read from there."""

_DIRECT = getattr(os, "O_DIRECT", 0)
_CACHESTAT = ctypes.c_long(451)
"""Number of the system call ``cachestat``, of Linux 6.5 and later, which libc does not name yet."""
_Span, _Counts = ctypes.c_uint64 * 2, ctypes.c_uint64 * 5
"""Its arguments: offset and length; pages that are cached, and four numbers that are not used."""


def read_range(file: FileIO, start: int, nbytes: int, *, direct: bool) -> Tensor:
    """Read bytes of an open file into memory of their own, (nbytes,) uint8.

    direct: read what is not in the page cache past it, where that is possible. Raises OSError, and
    DamagedChunkError if the file is shorter or no chunk can be that large.
    """
    if direct:
        _read_no_further(file.fileno())
        found = _read_directly(file.fileno(), start, nbytes)
        if found is not None:
            return found
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


def _read_directly(file: int, start: int, nbytes: int) -> Tensor | None:
    """Read bytes of an open file past the page cache; raises OSError.

    None if it is not worth it, because they are few or most are in the page cache, and if the
    system or the file system cannot do it, there is no buffer, or the file is shorter.
    """
    if nbytes < LEAST_BYTES or not _DIRECT or cached_share(file, start, nbytes) > CACHED_SHARE:
        return None
    skipped = start % BLOCK_BYTES
    raw = read_buffer(-(-(skipped + nbytes) // BLOCK_BYTES) * BLOCK_BYTES, skipped)
    if raw is None:
        return None
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, _DIRECT)
        if _fill(file, start - skipped, raw, skipped + nbytes):
            return raw[skipped : skipped + nbytes]
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
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

    1 if the system does not tell, as of a file of another user. Reading to find out, even with
    RWF_NOWAIT, would bring pages in.
    """
    begin = start - start % mmap.PAGESIZE
    size = min(start + nbytes, os.fstat(file).st_size) - begin
    if size <= 0:
        return 0.0
    pages = -(-size // mmap.PAGESIZE)
    told = _Counts()
    if not _libc().syscall(_CACHESTAT, file, _Span(begin, size), told, 0):
        return float(told[0]) / pages
    return _mapped_share(file, begin, size, pages)


def _mapped_share(file: int, begin: int, size: int, pages: int) -> float:
    """As cached_share, before Linux 6.5: takes ten times as long."""
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


def _read_no_further(file: int) -> None:
    """Keep the system from reading more of a file into the page cache than it is asked for."""
    with suppress(OSError, AttributeError):  # of a file system; on another system
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
