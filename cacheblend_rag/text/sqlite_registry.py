"""A chunk registry in an SQLite file, which survives restarts and is shared between processes.

Every process holds all chunks in memory, writes its own changes to the file at once, and reads
the changes of others before each search. Texts that no chunk needs any more are deleted from the
file and overwritten.

A document is stored as its pieces, each named by the digest of all that stands up to its end
(``Context.digest``), and with the name of what stands before it. So what several chunks, versions
or documents begin with is stored once, and a piece that was damaged is known by its digest. A chunk
is the name of its last piece, with a document and a collection.

A file may come from anywhere. So no foreign view, trigger or index is run, and an invalid row is
left out instead of failing the reader.
"""

from __future__ import annotations

import logging
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

from cacheblend_rag.errors import StoreError
from cacheblend_rag.folders import make_folder
from cacheblend_rag.printable import one_line
from cacheblend_rag.sqlite_file import connect
from cacheblend_rag.text.chunk import EMPTY, Chunk, Context
from cacheblend_rag.text.registry import ChunkRegistry, check_text

logger = logging.getLogger(__name__)

WAIT_SECONDS = 60.0
"""How long a write waits while another process writes to the file."""
POLL_SECONDS = 0.02
FAILURES = (sqlite3.Error, OSError, UnicodeDecodeError)
"""Errors of a file that cannot be used. The sqlite3 module raises the last one for an error
message that quotes bytes of a damaged file."""
SCHEMA = (
    """CREATE TABLE pieces (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    name BLOB NOT NULL UNIQUE,
    before BLOB NOT NULL,
    text BLOB NOT NULL
)""",
    """CREATE TABLE chunks (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    piece BLOB NOT NULL,
    document BLOB,
    collection BLOB NOT NULL
)""",
    """CREATE TABLE removals (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    chunk INTEGER NOT NULL,
    writer BLOB NOT NULL
)""",
    "CREATE INDEX pieces_by_before ON pieces (before)",
    "CREATE INDEX chunks_by_piece ON chunks (piece)",
)
OURS = {*SCHEMA, "CREATE TABLE sqlite_sequence(name,seq)"}
"""The statements in ``sqlite_master``; the last is SQLite's own, for AUTOINCREMENT."""
DELETE_UNNEEDED = """
DELETE FROM pieces WHERE name = :name
AND NOT EXISTS (SELECT 1 FROM chunks WHERE piece = :name)
AND NOT EXISTS (SELECT 1 FROM pieces WHERE before = :name)
"""
MOST_BYTES = 64 << 20
"""Most bytes of a row that SQLite writes or reads here."""


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
        self._name = secrets.token_bytes(8)
        # Reading and writing have a connection each: who reads does not wait for who writes.
        self._reading, self._writing = Lock(), Lock()
        self._watchers: list[Callable[[Sequence[Chunk]], None]] = []
        self._untold: list[Chunk] = []
        self._told_failure: str | None = None
        self._pieces: dict[bytes, Context] = {EMPTY.digest: EMPTY}
        self._chunks: dict[int, Chunk] = {}
        self._rows: dict[Chunk, int] = {}
        self._last = {"pieces": 0, "chunks": 0, "removals": 0}
        self._seen_version = -1
        with self._failing("opened"):
            if not read_only:
                make_folder(self.path.parent)
                self.path.touch(mode=0o600)
            self._reader = _connect(self.path, "ro" if read_only else "rw", 0)
            self._writer = self._reader
            if not read_only:
                self._writer = _connect(self.path, "rw", WAIT_SECONDS)
                self._make_tables()
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
            written: set[bytes] = set()
            for chunk in dict.fromkeys(chunks):
                if self._variants.get(chunk.text, {}).keys() != {chunk}:
                    self._write(chunk, written)

    def discard_many(self, chunks: Iterable[Chunk]) -> None:
        """Forget those of the chunks that are registered.

        Raises:
            StoreError: when the file cannot be written.
        """
        if self.read_only:
            super().discard_many(chunks)
            return
        with self._changing():
            for chunk in dict.fromkeys(chunks):
                self._remove_row(chunk)
                piece = chunk.passage
                while (
                    piece and self._writer.execute(DELETE_UNNEEDED, {"name": piece.digest}).rowcount
                ):
                    piece = piece.before

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
            self._reader.close()
            self._writer.close()

    # Reading

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
                    self._read()
                    return
            except sqlite3.Error as error:
                if not _is_busy(error) or time.monotonic() >= until:
                    raise
            time.sleep(POLL_SECONDS)

    def _read(self) -> None:
        """Take in what has changed since the last call; after an error, the next call does so."""
        (version,) = self._reader.execute("PRAGMA data_version").fetchone()
        if version == self._seen_version:
            return
        with self._reader:
            self._reader.execute("BEGIN")
            _check_schema(self._reader)
            removals = self._new_rows("removals", "chunk, writer").fetchall()
            added = self._new_rows("chunks", "piece, document, collection").fetchall()
            for _, row, _ in removals:
                self._forget_pieces(self._chunks.get(row))
            self._read_pieces()
        self._seen_version = version
        super().discard_many(self._taken_out(removals))
        super().add_many(self._taken_in(added))

    def _new_rows(self, table: str, columns: str) -> sqlite3.Cursor:
        """Select a table's rows after the last one that was read, each with its id first."""
        select = f"SELECT id, {columns} FROM {table} WHERE id > ? ORDER BY id"  # noqa: S608
        return self._reader.execute(select, (self._last[table],))

    def _forget_pieces(self, chunk: Chunk | None) -> None:
        """Drop from memory the pieces of a removed chunk that are no longer in the file."""
        piece = EMPTY if chunk is None else chunk.passage
        select = "SELECT 1 FROM pieces WHERE name = ?"
        while piece and piece.digest in self._pieces:
            if self._reader.execute(select, (piece.digest,)).fetchone() is not None:
                return
            del self._pieces[piece.digest]
            piece = piece.before

    def _read_pieces(self) -> None:
        """Read new pieces; a damaged one is left out, and those that follow it in its document."""
        once: dict[str, str] = {}  # a text that many rows hold is kept once
        for row, name, before, stored in self._new_rows("pieces", "name, before, text"):
            self._last["pieces"] = row
            try:
                text = _decoded(stored)
                piece = self._pieces[before].then(once.setdefault(text, text))
            except (ValueError, KeyError):
                continue
            if piece.digest == name:
                self._pieces[piece.digest] = piece

    def _taken_out(self, removals: Sequence[tuple[int, int, bytes]]) -> Iterator[Chunk]:
        """Yield removed chunks; those that another registry removed are still to be told."""
        for self._last["removals"], row, writer in removals:
            chunk = self._chunks.pop(row, None)
            if chunk is not None:
                self._rows.pop(chunk, None)
                self._untold += [] if writer == self._name else [chunk]
                yield chunk

    def _taken_in(self, rows: Sequence[tuple[Any, ...]]) -> Iterator[Chunk]:
        """Yield new chunks; invalid rows are left out, with one warning."""
        bad: list[str] = []
        for row, *values in rows:
            self._last["chunks"] = row
            try:
                chunk = self._chunk(*values)
            except ValueError as error:
                bad.append(f"row {row} of its chunks is left out: {error}")
            else:
                self._chunks[row], self._rows[chunk] = chunk, row
                yield chunk
        if bad:
            more = f", and {len(bad) - 1} more" if bad[1:] else ""
            logger.warning("chunk registry %s: %s%s", self.path, bad[0], more)

    def _chunk(self, name: object, document: object, collection: object) -> Chunk:
        """Return the chunk of a row; raises ValueError if the row is invalid."""
        piece = self._pieces.get(name) if isinstance(name, bytes) else None
        if piece is None or not piece.last.strip():
            raise ValueError("its text, or what stands before it, is missing or damaged")
        document_id = None if document is None else _decoded(document)
        return Chunk(piece.last, document_id, piece.before, _decoded(collection))

    def _tell(self) -> None:
        """Call the watchers with chunks that others removed; no lock is held meanwhile."""
        with self._reading:
            untold, self._untold = self._untold, []
        if untold:
            for watcher in self._watchers:
                watcher(untold)

    # Writing

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Lock the file after reading all earlier changes; read the new ones afterwards."""
        try:
            with self._failing("changed"), self._writing:
                with self._transaction():
                    self._read_news()
                    yield
                self._read_news(WAIT_SECONDS)
        finally:
            self._tell()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """Run the block in a transaction; waits for other processes' transactions."""
        with self._writer:
            self._writer.execute("BEGIN IMMEDIATE")
            yield

    def _make_tables(self) -> None:
        """Create the tables of an empty file."""
        self._writer.execute("PRAGMA secure_delete = ON")
        # A free page would keep the text of a writer that is killed while it commits.
        self._writer.execute("PRAGMA auto_vacuum = FULL")
        with self._transaction():
            (tables,) = self._writer.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
            for statement in () if tables else SCHEMA:
                self._writer.execute(statement)

    def _write(self, chunk: Chunk, written: set[bytes]) -> None:
        """Insert a chunk after all others; one that is in the file already moves to the end.

        written: names of the pieces that this transaction has written; a piece that could not be
        read is written again, in place of the damaged one.
        """
        self._remove_row(chunk)
        new: list[Context] = []
        piece = chunk.passage
        while piece.digest not in self._pieces and piece.digest not in written:
            new.append(piece)
            written.add(piece.digest)
            piece = piece.before
        self._writer.executemany(
            "INSERT OR REPLACE INTO pieces (name, before, text) VALUES (?, ?, ?)",
            [(one.digest, one.before.digest, _encoded(one.last)) for one in reversed(new)],
        )
        document = None if chunk.document_id is None else _encoded(chunk.document_id)
        self._writer.execute(
            "INSERT INTO chunks (piece, document, collection) VALUES (?, ?, ?)",
            (chunk.passage.digest, document, _encoded(chunk.collection)),
        )

    def _remove_row(self, chunk: Chunk) -> None:
        row = self._rows.get(chunk)
        if row is not None:
            self._writer.execute("DELETE FROM chunks WHERE id = ?", (row,))
            self._writer.execute(
                "INSERT INTO removals (chunk, writer) VALUES (?, ?)", (row, self._name)
            )

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


def _connect(path: Path, mode: str, wait_seconds: float) -> sqlite3.Connection:
    file = connect(path, mode, wait_seconds)
    file.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MOST_BYTES)
    return file


def _check_schema(file: sqlite3.Connection) -> None:
    """Check that a file has exactly our tables and indexes; raises DatabaseError otherwise."""
    rows = file.execute("SELECT sql, type, name FROM sqlite_master WHERE sql IS NOT NULL")
    found = {statement: f"its {kind} {str(name)[:40]!r}" for statement, kind, name in rows}
    if found.keys() == OURS:
        return
    foreign = [name for statement, name in found.items() if statement not in OURS]
    what = f"{foreign[0]} is not a registry's" if foreign else "a registry's tables are missing"
    raise sqlite3.DatabaseError(f"{what}; give another path, or delete it and index again")


def _decoded(stored: object) -> str:
    """Return a column's bytes as text; raises ValueError unless they are UTF-8 bytes."""
    if not isinstance(stored, bytes):  # SQLite's columns accept values of any type
        raise ValueError("a value is not text")
    return stored.decode("utf-8", "surrogatepass")


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
