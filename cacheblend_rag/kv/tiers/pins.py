"""The pins of a folder of chunk KV, in a file for every process that shares the folder."""

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
"""A key takes 97 or 130 bytes and a line end; a longer file was not written by this class."""


class PinFile:
    """Keys, one per line, in a file that anyone with write access to the folder may have written.

    Lines that are no keys are skipped; a file that is too large, a link or a pipe pins nothing.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: tuple[int, int, int] | None = None
        self._keys: frozenset[KVKey] = frozenset()

    def keys(self) -> frozenset[KVKey]:
        """Return the pinned keys; read again if the file has changed."""
        try:
            found = os.lstat(self._path)
        except FileNotFoundError:
            self._seen, self._keys = None, frozenset()
            return self._keys
        except OSError:  # the folder cannot be read now, which unpins nothing
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
        """Replace the pinned keys; under the folder's lock.

        Raises StoreError if these are too many, and OSError.
        """
        if len(keys) > MOST_PINS:
            raise StoreError(f"{len(keys)} chunks are more than the {MOST_PINS} that can be pinned")
        new = f"{self._path}.new"
        with suppress(FileNotFoundError):  # of a writer that was killed
            os.unlink(new)
        create(new, "".join(f"{key}\n" for key in sorted(map(str, keys))).encode(), fsync=False)
        os.replace(new, self._path)
