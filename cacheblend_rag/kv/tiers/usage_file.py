"""The record of a folder's chunks and bytes, updated by its writers."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

from cacheblend_rag.kv.tiers.contract import Usage
from cacheblend_rag.kv.tiers.files import create, overwrite, read_small

_USAGE = re.compile(rb"([0-9]{1,18}) ([0-9]{1,18})\n")
_LONGEST = 64


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
        path = str(self._path)
        text = b"%018d %018d\n" % (max(usage.entries, 0), max(usage.nbytes, 0))
        if overwrite(path, text):
            return
        with suppress(FileNotFoundError):  # of a writer that was killed
            os.unlink(f"{path}.new")
        create(f"{path}.new", text, fsync=False)
        os.replace(f"{path}.new", path)
