"""Pins of a folder of chunk KV: kept in a file, for every process that shares the folder."""

from __future__ import annotations

import logging
import os
from collections.abc import Set
from contextlib import suppress
from pathlib import Path

from cacheblend_rag.errors import StoreError
from cacheblend_rag.kv.chunk_kv import KVKey
from cacheblend_rag.kv.tiers.files import create, read_small

logger = logging.getLogger(__name__)

MOST_PINS = 10_000
MOST_BYTES = MOST_PINS * 256
"""A key takes 97 or 130 bytes and a line's end; a longer file is none of ours."""


class PinFile:
    """Keys, one a line, in a file that anybody who may write to the folder may have written.

    What is no key is passed over; a file that is too large, a link or a pipe pins nothing.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int, int] | None = None
        self._keys: frozenset[KVKey] = frozenset()

    def keys(self) -> frozenset[KVKey]:
        """Return what is pinned now; read anew where the file has changed."""
        try:
            found = os.lstat(self._path)
        except FileNotFoundError:
            self._seen, self._keys = None, frozenset()
            return self._keys
        except OSError:  # the folder cannot be read just now: nothing is unpinned by that
            return self._keys
        seen = found.st_ino, found.st_mtime_ns, found.st_size
        if seen != self._seen:
            text = read_small(self._path, MOST_BYTES)
            if found.st_size and not text:
                logger.warning(
                    "%s pins nothing: no file of at most %d bytes", self._path, MOST_BYTES
                )
            lines = text.decode("ascii", "replace").splitlines()[:MOST_PINS]
            named = (KVKey.parsed(line) for line in lines)
            self._keys = frozenset(key for key in named if key is not None)
            self._seen = seen
        return self._keys

    def write(self, keys: Set[KVKey]) -> None:
        """Replace what is pinned; under the folder's lock.

        Raises StoreError when these are too many, OSError.
        """
        if len(keys) > MOST_PINS:
            raise StoreError(f"{len(keys)} chunks are more than the {MOST_PINS} that can be pinned")
        new = f"{self._path}.new"
        with suppress(FileNotFoundError):  # of a writer that was killed
            os.unlink(new)
        create(new, "".join(f"{key}\n" for key in sorted(map(str, keys))).encode(), fsync=False)
        os.replace(new, self._path)
