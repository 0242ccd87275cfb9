"""Reads and writes the store's own files: no link is followed, and no pipe blocks."""

from __future__ import annotations

import os
import stat
from collections import deque
from collections.abc import Callable, Iterable
from io import FileIO
from itertools import islice
from pathlib import Path

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


def new_file(path: str) -> FileIO:
    """Open a file for writing that must not exist yet, for its owner alone."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    return open(descriptor, "wb", buffering=0)


def read_regular(path: Path, most: int) -> bytes:
    """Return a small regular file's bytes; b"" if it is larger, or not a regular file.

    Follows no link, and does not block on a pipe. Raises OSError when it cannot be opened or read.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        return b""
    with open(descriptor, "rb") as file:
        text = file.read(most + 1)
    return text if len(text) <= most else b""
