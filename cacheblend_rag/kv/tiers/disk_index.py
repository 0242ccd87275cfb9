"""SQLite index of a disk tier's folder, shared by processes: sizes, times, uses, pins of chunks.

Chunks are read by their file names; the index says which are evicted first, which have expired, and
which are pinned. An index that is lost, damaged or of another version is rebuilt from the files,
with a warning; only pins are lost then, since no file has them.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cacheblend_rag.errors import StoreError
from cacheblend_rag.kv.chunk_kv import KVKey
from cacheblend_rag.kv.stored_chunk import Entry
from cacheblend_rag.kv.tiers.admission import LEAST_HALVED, SAMPLE, Resident
from cacheblend_rag.kv.tiers.files import check_kind
from cacheblend_rag.kv.tiers.policy import Usage
from cacheblend_rag.sqlite_file import connect

logger = logging.getLogger(__name__)

TABLES = (
    "CREATE TABLE chunks (key TEXT PRIMARY KEY, nbytes INTEGER, written REAL, used REAL,"
    " hits INTEGER, CHECK (typeof(key) = 'text' AND typeof(nbytes) = 'integer' AND"
    " typeof(written) = 'real' AND typeof(used) = 'real' AND typeof(hits) = 'integer'))",
    "CREATE TABLE pins (key TEXT PRIMARY KEY, CHECK (typeof(key) = 'text'))",
    "CREATE INDEX chunks_by_use ON chunks (used)",
    "CREATE INDEX chunks_by_age ON chunks (written)",
)
ADD = (
    "INSERT INTO chunks VALUES (?, ?, ?, ?, 0) ON CONFLICT (key) DO UPDATE SET"
    " nbytes = excluded.nbytes, written = excluded.written, used = excluded.used"
)
NOT_PINNED = "key NOT IN (SELECT key FROM pins)"
DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
MOST_PINS = 10_000
LOCK_SECONDS = 10.0
READ_SECONDS = 0.1
"""How long a read waits while another process commits."""
NOTED_SECONDS = 1.0
"""How often uses are written; any other write takes them along."""
LATELY_SECONDS = 86_400.0
"""A chunk that was last used longer ago counts as never used."""


class DiskIndex:
    """The index of one folder. Safe to share between threads.

    Its methods raise OSError when it cannot be read or written. Those about chunks are called
    within ``reading`` or ``writing``, each of which is one transaction.

    path: its file. files: lists the folder's chunks. read_only: it is neither made nor written to.
    """

    def __init__(
        self,
        path: Path,
        files: Callable[[], Iterable[tuple[KVKey, Entry]]],
        *,
        read_only: bool = False,
    ) -> None:
        self._path, self._files, self._read_only = path, files, read_only
        self._lock, self._noting = threading.RLock(), threading.Lock()
        self._file: sqlite3.Connection | None = None
        self._noted: dict[str, tuple[float, int]] = {}
        self._noted_at, self._uses = time.monotonic(), 0
        self._pins, self._warned = frozenset[KVKey](), ""
        if not read_only:
            try:
                with self.writing():
                    pass
            except OSError as error:
                if _code(error.__cause__) != sqlite3.SQLITE_FULL:
                    raise
                logger.warning("what is stored is read, and nothing new is stored: %s", error)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Run the block in a read transaction; other processes may write meanwhile."""
        with self._transaction("DEFERRED", READ_SECONDS):
            yield

    @contextmanager
    def writing(self, wait_seconds: float | None = None) -> Iterator[None]:
        """Run the block in a write transaction; wait_seconds: most to wait for other processes."""
        seconds = LOCK_SECONDS if wait_seconds is None else wait_seconds
        with self._transaction("IMMEDIATE", seconds):
            self._write_uses()
            yield

    # Chunks

    def usage(self, without: KVKey | str = "") -> Usage:
        """Count all chunks and bytes, except the chunk ``without``."""
        counts = self._ask("SELECT COUNT(*), TOTAL(nbytes) FROM chunks WHERE key != ?", without)
        entries, nbytes = counts.fetchone()
        return Usage(entries, int(nbytes))

    def coldest(self, without: KVKey) -> Iterator[Resident]:
        """Yield the chunks that may be evicted for ``without``, least recently used first."""
        lately = time.time() - LATELY_SECONDS
        chosen = f"FROM chunks WHERE key != ? AND {NOT_PINNED} ORDER BY used"
        for name, nbytes, used, hits in self._ask(
            f"SELECT key, nbytes, used, hits {chosen}", without
        ):
            if (key := KVKey.parsed(name)) is not None:
                yield Resident(key, nbytes, 1 + hits if hits and used > lately else 0)

    def oldest(self, most: int) -> list[tuple[KVKey, Entry]]:
        """Return up to ``most`` chunks that are not pinned, the earliest stored first."""
        chosen = f"FROM chunks WHERE {NOT_PINNED} ORDER BY written LIMIT ?"
        found = self._ask(f"SELECT key, nbytes, written, used {chosen}", most)
        named = [(KVKey.parsed(name), Entry(*told)) for name, *told in found]
        return [(key, entry) for key, entry in named if key is not None]

    def add(self, key: KVKey, nbytes: int, written_at: float) -> None:
        """Note a chunk that is stored now, or replaced."""
        self._ask(ADD, key, nbytes, written_at, time.time())

    def remove(self, key: KVKey | str) -> None:
        """Note that a chunk is gone."""
        self._ask("DELETE FROM chunks WHERE key = ?", key)

    # Uses

    def note_use(self, key: KVKey) -> None:
        """Record a use in memory; about once a second uses are written, if nobody has to wait."""
        with self._noting:
            _, times = self._noted.get(str(key), (0.0, 0))
            self._noted[str(key)] = time.time(), times + 1
        if time.monotonic() - self._noted_at > NOTED_SECONDS and self._lock.acquire(blocking=False):
            try:
                self.flush()
            finally:
                self._lock.release()

    def flush(self) -> None:
        """Write the recorded uses; while another process writes they stay in memory."""
        with suppress(OSError), self.writing(wait_seconds=0.0):
            pass
        self._noted_at = time.monotonic()

    def last_uses(self) -> dict[str, float]:
        """Return the Unix time of each chunk's last use by ``str(key)``, as far as it is known."""
        if not self._read_only:
            self.flush()
        with suppress(OSError), self.reading():
            # A file that is only read is not checked for constraints.
            return dict(self._ask("SELECT key, used FROM chunks WHERE typeof(used) = 'real'"))
        return {}

    def _write_uses(self) -> None:
        with self._noting:
            noted, self._noted = self._noted, {}
        for name, (at, times) in noted.items():
            self._ask("UPDATE chunks SET used = ?, hits = hits + ? WHERE key = ?", at, times, name)
            self._uses += times
        if self._uses > LEAST_HALVED and self._uses > SAMPLE * self.usage().entries:
            self._ask("UPDATE chunks SET hits = hits / 2")  # old uses count less and less
            self._uses = 0
        self._noted_at = time.monotonic()

    # Pins

    def pins(self) -> frozenset[KVKey]:
        """Return the pinned keys; if the index cannot be read, those that were read last."""
        try:
            with self.reading():
                names = self._ask("SELECT key FROM pins LIMIT ?", MOST_PINS)
                self._pins = frozenset(key for (name,) in names if (key := KVKey.parsed(name)))
        except OSError as error:
            if not self._read_only and str(error) != self._warned:  # each chunk of a prompt may ask
                self._warned = str(error)
                logger.warning("pins stay as they were: %s", error)
        return self._pins

    def pin(self, keys: Iterable[KVKey]) -> None:
        """Pin keys of chunks that are stored or not; raises StoreError if there are too many."""
        with self.writing():
            for key in keys:
                self._ask("INSERT OR IGNORE INTO pins VALUES (?)", key)
            (pinned,) = self._ask("SELECT COUNT(*) FROM pins").fetchone()
            if pinned > MOST_PINS:
                raise StoreError(
                    f"{pinned} chunks are more than the {MOST_PINS} that can be pinned"
                )

    def unpin(self, keys: Iterable[KVKey]) -> None:
        """Undo pin."""
        with self.writing():
            for key in keys:
                self._ask("DELETE FROM pins WHERE key = ?", key)

    # The file

    def close(self) -> None:
        """Write the recorded uses, and close the file; the next call opens it again."""
        with self._lock:
            if self._file is not None and not self._read_only:
                self.flush()
            self._close()

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _ask(self, statement: str, *values: KVKey | str | float) -> sqlite3.Cursor:
        if self._file is None:
            raise sqlite3.ProgrammingError("not within a transaction")
        given = [str(value) if isinstance(value, KVKey) else value for value in values]
        return self._file.execute(statement, given)

    @contextmanager
    def _transaction(self, kind: str, wait_seconds: float) -> Iterator[None]:
        """Run a transaction; a file that fails is closed, and opened anew for the next one."""
        with self._lock:
            try:
                if self._file is None:
                    self._open()
                self._ask(f"PRAGMA busy_timeout = {int(wait_seconds * 1000)}")
                self._ask(f"BEGIN {kind}")
                try:
                    yield
                    self._ask("COMMIT")
                except BaseException:
                    with suppress(sqlite3.Error):
                        self._ask("ROLLBACK")
                    raise
            except sqlite3.Error as error:
                if _code(error) != sqlite3.SQLITE_BUSY:
                    self._close()
                raise OSError(f"{self._path}: {error}") from error

    def _open(self) -> None:
        """Open the file; one that is damaged, or another version's, is replaced."""
        with suppress(FileNotFoundError):
            check_kind(str(self._path), os.lstat(self._path), stat.S_ISREG, "file")
        if not self._read_only:
            os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600))
        mode = "ro" if self._read_only else "rw"
        self._file = connect(self._path, mode, LOCK_SECONDS)
        try:
            self._check() if self._read_only else self._agree()
        except BaseException as error:
            self._close()
            if self._read_only or _code(error) not in DAMAGED:
                raise
            logger.warning("%s is made anew, its pins are lost: %s", self._path, error)
            os.unlink(self._path)
            self._open()

    def _agree(self) -> None:
        """Make the tables, and update rows to the files, which others may have changed."""
        self._ask("PRAGMA synchronous = OFF")  # what a power cut damages is made anew
        self._ask("BEGIN IMMEDIATE")
        if self._ask("SELECT 1 FROM sqlite_master").fetchone() is None:
            for statement in TABLES:
                self._ask(statement)
        self._check()
        known = dict(self._ask("SELECT key, nbytes FROM chunks"))
        for key, entry in self._files():
            if known.pop(str(key), None) != entry.nbytes:
                self._ask(ADD, key, entry.nbytes, entry.written_at, entry.written_at)
        for name in known:
            self.remove(name)
        self._ask("COMMIT")

    def _check(self) -> None:
        """Raise DatabaseError if the file is damaged, or its schema is not exactly ours."""
        own = {sql for (sql,) in self._ask("SELECT sql FROM sqlite_master") if sql is not None}
        if own != set(TABLES):
            raise sqlite3.DatabaseError("its tables are another version's")
        (found,) = self._ask("PRAGMA quick_check(1)").fetchone()
        if found != "ok":
            raise sqlite3.DatabaseError(found)


def _code(error: BaseException | None) -> int | None:
    """Return SQLite's primary error code; errors that this module raises count as damage."""
    if not isinstance(error, sqlite3.DatabaseError):
        return None
    return int(getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)) & 0xFF
