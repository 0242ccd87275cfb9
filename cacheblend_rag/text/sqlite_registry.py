"""A chunk registry in an SQLite file, which survives restarts and is shared between processes.

Every process holds all chunks in memory, writes its own changes to the file at once, and reads
the changes of others before each search. A context is stored as its last piece and the context
before that, so a document takes little more than its text. Texts that no chunk needs any more are
deleted from the file and overwritten.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import RLock

from cacheblend_rag.errors import PromptError, StoreError
from cacheblend_rag.folders import make_folder
from cacheblend_rag.text.chunk import EMPTY, Chunk, Context
from cacheblend_rag.text.registry import ChunkRegistry
from cacheblend_rag.text.registry_file import (
    MOST_BYTES,
    NO_CONTEXT,
    TABLES,
    VERSION,
    BadRowError,
    RegistryRows,
    bounded,
    check_schema,
    decoded,
    encoded,
    open_file,
    warning_of,
)

logger = logging.getLogger(__name__)

WAIT_SECONDS = 60.0
READ_SECONDS = 0.1


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
        StoreError: when the file cannot be opened or is no registry of this version.

    Attributes:
        path, read_only: as given.
    """

    def __init__(self, path: str | Path, *, read_only: bool = False) -> None:
        super().__init__()
        self.read_only = read_only
        self.path = Path(path)
        self._file_lock = RLock()
        self._rows: dict[int, Chunk] = {}
        self._ids: dict[Chunk, int] = {}
        self._contexts: dict[int, Context] = {NO_CONTEXT: EMPTY}
        self._written: dict[int, Chunk] = {}
        self._latest: tuple[Context, int] = (EMPTY, NO_CONTEXT)
        self._watchers: list[Callable[[Sequence[Chunk]], None]] = []
        self._removed_here: set[int] = set()
        self._untold: list[Chunk] = []
        self._last_chunk = self._last_removal = self._seen_version = 0
        self._checked_schema = -1
        self._told_failure: str | None = None
        self._patience = READ_SECONDS
        with self._failing("opened"):
            if not read_only:
                make_folder(self.path.parent)
                self.path.touch(mode=0o600)
            uri = f"{self.path.absolute().as_uri()}?mode={'ro' if read_only else 'rw'}"
            self._file = open_file(uri, timeout=WAIT_SECONDS)
            if not read_only:
                self._file.execute("PRAGMA secure_delete = ON")
                self._make_tables()
            self._read_news()

    def add_many(self, chunks: Iterable[Chunk]) -> None:
        """Register chunks in order, all of them or, on an error, none.

        Raises:
            PromptError: on empty text.
            StoreError: when the file cannot be written.
        """
        chunks = list(dict.fromkeys(reversed(list(chunks))))[::-1]  # the last of equal ones counts
        for chunk in chunks:
            self.check(chunk)
        if self.read_only:
            super().add_many(chunks)
            return
        with self._writing():
            for chunk in chunks:
                if self._variants.get(chunk.text, {}).keys() != {chunk}:
                    self._delete_row(chunk)
                    self._insert_row(chunk)

    def discard_many(self, chunks: Iterable[Chunk]) -> None:
        """Forget those of the chunks that are registered.

        Raises:
            StoreError: when the file cannot be written.
        """
        if self.read_only:
            super().discard_many(chunks)
            return
        with self._writing():
            for chunk in dict.fromkeys(chunks):
                self._delete_row(chunk)

    def refresh(self) -> None:
        """Read changes by other processes, waiting for a writer.

        Raises:
            StoreError: when the file cannot be read.
        """
        if self.read_only:
            self._catch_up()
            return
        with self._writing():
            pass

    def watch(self, removed: Callable[[Sequence[Chunk]], None]) -> None:
        """Call a function with chunks that other processes, or other registries, forget."""
        self._watchers.append(removed)

    def close(self) -> None:
        """Close the file; this object still knows the chunks read so far."""
        with self._file_lock:
            self._file.close()

    # Reading

    def _catch_up(self) -> None:
        """Read changes that other processes have committed since the last read."""
        if not self._file_lock.acquire(timeout=self._patience):
            self._patience = 0.0
            return
        try:
            self._wait_for_others(self._patience)
            (version,) = self._file.execute("PRAGMA data_version").fetchone()
            if version != self._seen_version:
                self._read_news()
            self._patience = READ_SECONDS
            self._told_failure = None
        except sqlite3.Error as error:
            if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_BUSY:
                self._patience = 0.0  # waiting once is enough: later calls do not wait
            else:
                self._say_failure(error)
        except PromptError as error:
            self._say_failure(error)
        finally:
            self._file_lock.release()
        self._tell()

    def _say_failure(self, error: Exception) -> None:
        """Log why the file cannot be read, once per reason."""
        if str(error) != self._told_failure:
            logger.warning("chunk registry %s cannot be read: %s", self.path, error)
        self._told_failure = str(error)

    def _tell(self) -> None:
        """Call the watchers with chunks that others removed, after the lock is released."""
        untold, self._untold = self._untold, []
        if untold:
            for watcher in self._watchers:
                watcher(untold)

    def _wait_for_others(self, seconds: float) -> None:
        """Set how long each use of the file waits for other processes."""
        if not self._file.in_transaction:
            self._file.execute(f"PRAGMA busy_timeout = {int(seconds * 1000)}")

    def _read_news(self) -> None:
        """Apply removals, then additions, since the last read."""
        with self._file_lock, self._transaction("DEFERRED"):
            (version,) = self._file.execute("PRAGMA data_version").fetchone()
            self._check_schema()
            removed = self._file.execute(
                "SELECT id, chunk FROM removals WHERE id > ? ORDER BY id", (self._last_removal,)
            ).fetchall()
            added = self._file.execute(
                f"SELECT id, text, {bounded('document')}, context, {bounded('collection')}"  # noqa: S608
                " FROM chunks WHERE id > ? ORDER BY id",
                (self._last_chunk,),
            ).fetchall()
            others = [row for _, row in removed if row not in self._removed_here]
            self._untold += [self._rows[row] for row in others if row in self._rows]
            gone = [self._rows.pop(row) for _, row in removed if row in self._rows]
            for chunk in gone:
                self._ids.pop(chunk, None)
            super().discard_many(gone)
            self._take_in(added)
            self._last_removal = removed[-1][0] if removed else self._last_removal
            self._seen_version = version

    def _check_schema(self) -> None:
        """Check the file's schema, unless it is unchanged since the last check."""
        (version,) = self._file.execute("PRAGMA schema_version").fetchone()
        if version != self._checked_schema:
            check_schema(self._file)
            self._checked_schema = version

    def _take_in(self, added: Sequence[tuple[int, object, object, object, object]]) -> None:
        """Add rows of chunks; invalid rows are left out, with one warning."""
        rows, bad = RegistryRows(self._file, self._contexts), list[tuple[int, str]]()
        for row, text, document, context, collection in added:
            self._last_chunk = row
            try:
                chunk = self._written.pop(row, None) or Chunk(
                    rows.text(text),
                    None if document is None else decoded(document),
                    rows.context(context),
                    decoded(collection),
                )
                super().add_many([chunk])
            except (BadRowError, PromptError) as error:
                bad.append((row, str(error)))
            else:
                self._rows[row], self._ids[chunk] = chunk, row
        if bad:
            logger.warning("chunk registry %s: %s", self.path, warning_of(bad))

    # Writing

    def _make_tables(self) -> None:
        """Create the tables of an empty file; raises StoreError for another version."""
        with self._transaction("IMMEDIATE"):
            (version,) = self._file.execute("PRAGMA user_version").fetchone()
            (tables,) = self._file.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
            if (version, tables) == (0, 0):
                for statement in TABLES.split(";"):
                    self._file.execute(statement)
                self._file.execute(f"PRAGMA user_version = {VERSION}")
            elif version != VERSION:
                raise StoreError(
                    f"{self.path} is not a chunk registry of version {VERSION}: give another path, "
                    "or delete it and index again"
                )

    def _insert_row(self, chunk: Chunk) -> None:
        """Write a chunk, and its texts and context if they are new."""
        document = None if chunk.document_id is None else _bytes(chunk.document_id)
        context = self._context_id(Context(chunk.context))
        text = self._text_id(chunk.text)
        row = self._insert(
            "chunks",
            text=text,
            document=document,
            context=context,
            collection=_bytes(chunk.collection),
        )
        self._written[row] = chunk

    def _context_id(self, context: Context) -> int:
        """Return a context's id; its parent context is usually stored already."""
        latest, row = self._latest
        unknown: list[str] = []
        before = context
        while before and before != latest:
            unknown.append(before.last)
            before = before.before
        row = row if before else NO_CONTEXT
        for piece in reversed(unknown):
            row = self._id_of("contexts", parent=row, text=self._text_id(piece))
        self._latest = context, row
        return row

    def _delete_row(self, chunk: Chunk) -> None:
        """Delete a chunk, if it exists, and the texts and contexts that only it needed."""
        row = self._ids.get(chunk)
        if row is None:
            return
        found = self._file.execute(
            "SELECT text, context FROM chunks WHERE id = ?", (row,)
        ).fetchone()
        self._file.execute("DELETE FROM chunks WHERE id = ?", (row,))
        self._insert("removals", chunk=row)
        self._removed_here.add(row)
        text, context = found or (None, NO_CONTEXT)  # another process may have deleted it
        self._delete_text(text)
        while context != NO_CONTEXT and not self._needs_context(context):
            found = self._file.execute(
                "SELECT parent, text FROM contexts WHERE id = ?", (context,)
            ).fetchone()
            if found is None:  # the file was changed by something else
                return
            parent, text = found
            self._file.execute("DELETE FROM contexts WHERE id = ?", (context,))
            self._contexts.pop(context, None)
            self._latest = EMPTY, NO_CONTEXT
            self._delete_text(text)
            context = parent

    def _needs_context(self, context: object) -> bool:
        return self._has("chunks WHERE context = ?", context) or self._has(
            "contexts WHERE parent = ?", context
        )

    def _delete_text(self, text: object) -> None:
        if not self._has("chunks WHERE text = ?", text) and not self._has(
            "contexts WHERE text = ?", text
        ):
            self._file.execute("DELETE FROM texts WHERE id = ?", (text,))

    def _has(self, rows: str, value: object) -> bool:
        return self._file.execute(f"SELECT 1 FROM {rows} LIMIT 1", (value,)).fetchone() is not None  # noqa: S608

    def _text_id(self, text: str) -> int:
        return self._id_of("texts", text=_bytes(text))

    def _id_of(self, table: str, **values: int | bytes) -> int:
        """Return the id of the row that holds ``values``, inserted when it is new."""
        match = " AND ".join(f"{name} = ?" for name in values)
        found = self._file.execute(f"SELECT id FROM {table} WHERE {match}", [*values.values()])  # noqa: S608
        row = found.fetchone()
        return self._insert(table, **values) if row is None else int(row[0])

    def _insert(self, table: str, **values: int | bytes | None) -> int:
        names, marks = ", ".join(values), ", ".join("?" * len(values))
        written = self._file.execute(
            f"INSERT INTO {table} ({names}) VALUES ({marks})",  # noqa: S608
            [*values.values()],
        )
        return int(written.lastrowid or 0)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Lock the file after reading all earlier changes; read the new ones afterwards."""
        with self._file_lock, self._failing("changed"):
            try:
                self._wait_for_others(WAIT_SECONDS)
                with self._transaction("IMMEDIATE"):
                    self._read_news()
                    yield
                self._read_news()
            finally:  # others may remove these rows once the lock is released
                self._latest = EMPTY, NO_CONTEXT
                self._written.clear()
                self._removed_here.clear()
        self._tell()

    @contextmanager
    def _transaction(self, kind: str) -> Iterator[None]:
        """Run one transaction; inside another one, join it."""
        if self._file.in_transaction:
            yield
            return
        self._file.execute(f"BEGIN {kind}")
        try:
            yield
            self._file.execute("COMMIT")
        except BaseException:
            if self._file.in_transaction:
                self._file.execute("ROLLBACK")
            raise

    @contextmanager
    def _failing(self, what: str) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, PromptError, OSError) as error:
            raise StoreError(f"chunk registry {self.path} cannot be {what}: {error}") from error


def _bytes(text: str) -> bytes:
    """Return text as stored bytes; raises PromptError if it is too long to be read again."""
    stored = encoded(text)
    if len(stored) > MOST_BYTES:
        raise PromptError(f"a text of {len(stored):,} bytes is longer than {MOST_BYTES:,}")
    return stored
