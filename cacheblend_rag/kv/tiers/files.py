"""Reads and writes the store's own files: no link is followed, and no pipe blocks.

Among them the pins and the usage of a folder, which all its processes share.
"""

from __future__ import annotations

import logging
import os
import re
import stat
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import contextmanager, suppress
from io import FileIO
from itertools import islice
from pathlib import Path

from cacheblend_rag.errors import StoreError
from cacheblend_rag.kv.chunk_kv import KVKey
from cacheblend_rag.kv.tiers.policy import Usage

logger = logging.getLogger(__name__)

MOST_PINS = 10_000
MOST_BYTES = MOST_PINS * 256
"""A key takes 97 or 130 bytes and a line end; a longer file was not written by this class."""
_USAGE = re.compile(rb"([0-9]{1,18}) ([0-9]{1,18})\n")
_LONGEST = 64
PARTS_A_WRITE = 1024
"""Linux' IOV_MAX."""


def check_kind(
    path: str, found: os.stat_result, is_right: Callable[[int], bool], wanted: str
) -> None:
    """Raise OSError for a link, a pipe or the like in place of a store's file or folder."""
    if is_right(found.st_mode):
        return
    kinds = {stat.S_ISLNK: "a link", stat.S_ISFIFO: "a pipe", stat.S_ISDIR: "a folder"}
    kind = next((name for test, name in kinds.items() if test(found.st_mode)), "something else")
    kind = "a file" if stat.S_ISREG(found.st_mode) else kind
    raise OSError(f"{path} is {kind} instead of the store's own {wanted}: remove it")


def write_parts(file: FileIO, parts: Iterable[bytes | memoryview]) -> None:
    """Write all parts, many per call: after each call this thread waits for the interpreter."""
    left = deque(memoryview(part) for part in parts)
    while left:
        written = os.writev(file.fileno(), list(islice(left, PARTS_A_WRITE)))
        while left and written >= left[0].nbytes:
            written -= left.popleft().nbytes
        if written:
            left[0] = left[0][written:]


def create(path: str, text: bytes, *, fsync: bool = False) -> None:
    """Write a small file that must not be there yet."""
    with new_file(path, fsync=fsync) as file:
        write_parts(file, [text])


def replace(path: str | os.PathLike[str], text: bytes) -> None:
    """Put a small file in another one's place; under a lock of the folder."""
    new = f"{os.fspath(path)}.new"
    with suppress(FileNotFoundError):  # of a writer that was killed
        os.unlink(new)
    create(new, text)
    os.replace(new, path)


@contextmanager
def new_file(path: str, *, fsync: bool) -> Iterator[FileIO]:
    """Write a file that must not exist yet."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "wb", buffering=0) as file:
        yield file
        if fsync:
            os.fsync(descriptor)


def read_small(path: Path, most: int) -> bytes:
    """Return a small regular file's bytes; b"" if it is missing, larger, or not a regular file.

    Follows no link, and does not block on a pipe.
    """
    try:
        return read_regular(path, most)
    except OSError:
        return b""


def read_regular(path: Path, most: int) -> bytes:
    """As read_small, but raises OSError when the file cannot be opened or read."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        return b""
    with open(descriptor, "rb") as file:
        text = file.read(most + 1)
    return text if len(text) <= most else b""


class PinFile:
    """Keys, one per line, in a file that anyone with write access to the folder may have written.

    Lines that are no keys are skipped; a file that is too large, a link or a pipe pins nothing. A
    file that cannot be read leaves the keys as they were read last.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        # One attribute for both, so that threads never see the keys of one file as another's.
        self._read: tuple[tuple[int, int, int] | None, frozenset[KVKey]] = (None, frozenset())
        self._warned = ""

    def keys(self) -> frozenset[KVKey]:
        """Return the pinned keys; read again if the file has changed. Raises no OSError."""
        try:
            return self.current()
        except OSError as error:
            if str(error) != self._warned:  # each chunk of a prompt may ask
                self._warned = str(error)
                logger.warning("%s cannot be read, pins stay as they were: %s", self._path, error)
            return self._read[1]

    def current(self) -> frozenset[KVKey]:
        """Return the pinned keys as the file has them now; raises OSError if it cannot be read."""
        try:
            found = os.lstat(self._path)
        except FileNotFoundError:
            self._read = (None, frozenset())
            return frozenset()
        seen = found.st_ino, found.st_mtime_ns, found.st_size
        before, keys = self._read
        if seen != before:
            keys = frozenset(self._lines(found))
            self._read = (seen, keys)
        return keys

    def _lines(self, found: os.stat_result) -> Iterator[KVKey]:
        if not stat.S_ISREG(found.st_mode) or found.st_size > MOST_BYTES:
            logger.warning(
                "%s pins nothing: it is not a file of at most %d bytes", self._path, MOST_BYTES
            )
            return
        text = read_regular(self._path, MOST_BYTES)
        for line in text.decode("ascii", "replace").splitlines()[:MOST_PINS]:
            if (key := KVKey.parsed(line)) is not None:
                yield key

    def write(self, keys: Set[KVKey]) -> None:
        """Replace the pinned keys; under the folder's lock.

        Raises StoreError if these are too many, and OSError.
        """
        if len(keys) > MOST_PINS:
            raise StoreError(f"{len(keys)} chunks are more than the {MOST_PINS} that can be pinned")
        replace(self._path, "".join(f"{key}\n" for key in sorted(map(str, keys))).encode())


class UsageFile:
    """Entries and bytes, in a file; read and written under the folder's lock.

    A writer records before its file appears, and an eviction after its file is gone: a process
    killed in between leaves the record too high, never too low; the next search of a full store
    corrects it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> Usage | None:
        """Return the recorded usage, None if there is no valid record."""
        match = _USAGE.fullmatch(read_small(self._path, _LONGEST))
        return Usage(int(match[1]), int(match[2])) if match else None

    def write(self, usage: Usage) -> None:
        """Record the usage."""
        replace(self._path, b"%d %d\n" % (max(usage.entries, 0), max(usage.nbytes, 0)))
