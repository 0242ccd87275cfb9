"""A chunk registry in an SQLite file, which survives restarts and is shared between processes.

Every process holds all chunks in memory, writes its own changes to the file at once, and reads
the changes of others before each search. Texts that no chunk needs any more are deleted from the
file and overwritten.
"""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

from cacheblend_rag.errors import StoreError
from cacheblend_rag.folders import make_folder
from cacheblend_rag.printable import one_line
from cacheblend_rag.text.chunk import Chunk
from cacheblend_rag.text.registry import ChunkRegistry, check_text
from cacheblend_rag.text.registry_file import RegistryFile

logger = logging.getLogger(__name__)

WAIT_SECONDS = 60.0
"""How long a write waits while another process writes to the file."""
POLL_SECONDS = 0.02
FAILURES = (sqlite3.Error, OSError, UnicodeDecodeError)
"""Errors of a file that cannot be used. The sqlite3 module raises the last one for an error
message that quotes bytes of a damaged file."""


class SharedChunkRegistry(ChunkRegistry):
    """A ChunkRegistry in the file ``path``; ChunkRegistry describes how chunks are found.

    Changes by another process are seen at the next call. While another process writes to the file,
    calls that only read use the chunks in memory. If the file becomes unreadable later, they do
    the same and log a warning; calls that change the file wait for each other, and raise then.

    Args:
        path: the file; it and its folder are created if missing.
        read_only: whether the file is only read: changes through this object then affect
            this object alone.

    Raises:
        StoreError: when the file cannot be opened or is no registry.

    Attributes:
        path, read_only: as given.
    """

    def __init__(self, path: str | Path, *, read_only: bool = False) -> None:
        super().__init__()
        self.path, self.read_only = Path(path), read_only
        self._reading, self._writing = Lock(), Lock()
        self._watchers: list[Callable[[Sequence[Chunk]], None]] = []
        self._untold: list[Chunk] = []
        self._told_failure: str | None = None
        with self._failing("opened"):
            if not read_only:
                make_folder(self.path.parent)
                self.path.touch(mode=0o600)
            self._file = RegistryFile(self.path, read_only=read_only, wait_seconds=WAIT_SECONDS)
            self._read_news(WAIT_SECONDS)

    def add_many(self, chunks: Iterable[Chunk]) -> None:
        """Register chunks in order, all of them or, on an error, none.

        Raises:
            PromptError: when a text is empty or only white space.
            StoreError: when the file cannot be written.
        """
        chunks = list(chunks)
        for chunk in chunks:
            check_text(chunk)
        if self.read_only:
            super().add_many(chunks)
            return
        with self._changing():
            new = [c for c in chunks if self._variants.get(c.text, {}).keys() != {c}]
            self._file.add(new)

    def discard_many(self, chunks: Iterable[Chunk]) -> None:
        """Forget those of the chunks that are registered.

        Raises:
            StoreError: when the file cannot be written.
        """
        if self.read_only:
            super().discard_many(chunks)
            return
        with self._changing():
            self._file.remove(chunks)

    def refresh(self) -> None:
        """Read changes by other processes, waiting for a writer.

        Raises:
            StoreError: when the file cannot be read.
        """
        with self._failing("read"):
            self._read_news(WAIT_SECONDS)
        self._tell()

    def watch(self, removed: Callable[[Sequence[Chunk]], None]) -> None:
        """Call a function with chunks that other processes, or other registries, forget."""
        self._watchers.append(removed)

    def close(self) -> None:
        """Close the file; this object still knows the chunks read so far."""
        with self._writing, self._reading:
            self._file.close()

    def _catch_up(self) -> None:
        """Read what other processes have committed, unless one of them is writing just now."""
        try:
            self._read_news()
            self._told_failure = None
        except FAILURES as error:
            why = one_line(str(error))  # it may quote the file, which anybody may have written
            if not _is_busy(error) and why != self._told_failure:
                logger.warning("chunk registry %s cannot be read: %s", self.path, why)
                self._told_failure = why
        self._tell()

    def _read_news(self, wait_seconds: float = 0) -> None:
        """Bring the chunks in memory up to date with the file; searches go on while it waits."""
        until = time.monotonic() + wait_seconds
        while True:
            try:
                with self._reading:
                    news = self._file.news()
                    super().discard_many(news.removed)
                    super().add_many(news.added)
                    self._untold += news.by_others
                    return
            except sqlite3.Error as error:
                if not _is_busy(error) or time.monotonic() >= until:
                    raise
            time.sleep(POLL_SECONDS)

    def _tell(self) -> None:
        """Call the watchers with chunks that others removed; no lock is held meanwhile."""
        with self._reading:
            untold, self._untold = self._untold, []
        if untold:
            for watcher in self._watchers:
                watcher(untold)

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Lock the file after reading all earlier changes; read the new ones afterwards."""
        try:
            with self._failing("changed"), self._writing:
                with self._file.changing():
                    self._read_news()
                    yield
                self._read_news(WAIT_SECONDS)
        finally:
            self._tell()

    @contextmanager
    def _failing(self, what: str) -> Iterator[None]:
        try:
            yield
        except FAILURES as error:
            why = one_line(str(error))
            raise StoreError(f"chunk registry {self.path} cannot be {what}: {why}") from error


def _is_busy(error: Exception) -> bool:
    """Whether another process is writing."""
    return getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_BUSY
