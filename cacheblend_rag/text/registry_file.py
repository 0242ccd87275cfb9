"""A registry's SQLite file: its tables, how they are changed, and what is read of them.

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
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cacheblend_rag.sqlite_file import connect
from cacheblend_rag.text.chunk import EMPTY, Chunk, Context

logger = logging.getLogger(__name__)

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


@dataclass(slots=True)
class News:
    """What has changed in a file.

    removed: chunks that are gone. by_others: those of them that another registry removed. added:
    new chunks, in order.
    """

    removed: list[Chunk] = field(default_factory=list)
    by_others: list[Chunk] = field(default_factory=list)
    added: list[Chunk] = field(default_factory=list)


class RegistryFile:
    """A registry's file. It is read by one thread at a time, and changed by one at a time.

    Reading and writing have a connection each: who reads does not wait for who writes.

    Args:
        path: the file; one that is empty gets its tables.
        read_only: whether nothing may be written, not even to undo what a killed writer began.
        wait_seconds: how long a change waits for other processes.
    """

    def __init__(self, path: Path, *, read_only: bool, wait_seconds: float) -> None:
        self._path = path
        self._name = secrets.token_bytes(8)
        self._pieces: dict[bytes, Context] = {EMPTY.digest: EMPTY}
        self._chunks: dict[int, Chunk] = {}
        self._row_of: dict[Chunk, int] = {}
        self._last_piece = self._last_chunk = self._last_removal = 0
        self._seen_version = -1
        self._reader = _connect(path, "ro" if read_only else "rw", 0)
        self._writer = self._reader if read_only else _connect(path, "rw", wait_seconds)
        if not read_only:
            self._writer.execute("PRAGMA secure_delete = ON")
            # A free page would keep the text of a writer that is killed while it commits.
            self._writer.execute("PRAGMA auto_vacuum = FULL")
            self._make_tables()

    def close(self) -> None:
        """Close the file."""
        self._reader.close()
        self._writer.close()

    # Reading

    def news(self) -> News:
        """Return what has changed since the last call.

        Raises:
            sqlite3.Error: when another process is writing, when the file cannot be read, or when
                it is no registry's. The next call returns the same changes.
        """
        (version,) = self._reader.execute("PRAGMA data_version").fetchone()
        if version == self._seen_version:
            return News()
        with self._reader:
            self._reader.execute("BEGIN")
            _check_schema(self._reader)
            removals = self._rows("removals", "chunk, writer", self._last_removal).fetchall()
            added = self._rows("chunks", "piece, document, collection", self._last_chunk).fetchall()
            for _, row, _ in removals:
                self._forget_pieces(self._chunks.get(row))
            self._read_pieces()
        self._seen_version = version
        news = News()
        self._take_out(removals, news)
        self._take_in(added, news)
        return news

    def _rows(self, table: str, columns: str, last: int) -> sqlite3.Cursor:
        """Select a table's rows after the last one that was read, each with its id first."""
        select = f"SELECT id, {columns} FROM {table} WHERE id > ? ORDER BY id"  # noqa: S608
        return self._reader.execute(select, (last,))

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
        for row, name, before, stored in self._rows(
            "pieces", "name, before, text", self._last_piece
        ):
            self._last_piece = row
            try:
                text = _decoded(stored)
                piece = self._pieces[before].then(once.setdefault(text, text))
            except (ValueError, KeyError):
                continue
            if piece.digest == name:
                self._pieces[piece.digest] = piece

    def _take_out(self, removals: Sequence[tuple[int, int, bytes]], news: News) -> None:
        for last, row, writer in removals:
            self._last_removal = last
            chunk = self._chunks.pop(row, None)
            if chunk is not None:
                self._row_of.pop(chunk, None)
                news.removed.append(chunk)
                if writer != self._name:
                    news.by_others.append(chunk)

    def _take_in(self, rows: Sequence[tuple[Any, ...]], news: News) -> None:
        """Add chunks; invalid rows are left out, with one warning."""
        bad: list[str] = []
        for row, *values in rows:
            self._last_chunk = row
            try:
                chunk = self._chunk(*values)
            except ValueError as error:
                bad.append(f"row {row} of its chunks is left out: {error}")
            else:
                self._chunks[row], self._row_of[chunk] = chunk, row
                news.added.append(chunk)
        if bad:
            more = f", and {len(bad) - 1} more" if bad[1:] else ""
            logger.warning("chunk registry %s: %s%s", self._path, bad[0], more)

    def _chunk(self, name: object, document: object, collection: object) -> Chunk:
        """Return the chunk of a row; raises ValueError if the row is invalid."""
        piece = self._pieces.get(name) if isinstance(name, bytes) else None
        if piece is None or not piece.last.strip():
            raise ValueError("its text, or what stands before it, is missing or damaged")
        document_id = None if document is None else _decoded(document)
        return Chunk(piece.last, document_id, piece.before, _decoded(collection))

    # Writing

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Run the block in a transaction; waits for other processes' transactions."""
        with self._writer:
            self._writer.execute("BEGIN IMMEDIATE")
            yield

    def _make_tables(self) -> None:
        """Create the tables of an empty file."""
        with self.changing():
            (tables,) = self._writer.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
            for statement in () if tables else SCHEMA:
                self._writer.execute(statement)

    def add(self, chunks: Iterable[Chunk]) -> None:
        """Insert chunks after all others; one that is in the file already moves to the end.

        All earlier changes must have been read.
        """
        written: set[bytes] = set()
        for chunk in dict.fromkeys(chunks):
            self._remove_row(chunk)
            passage = chunk.passage
            self._write_pieces(passage, written)
            document = None if chunk.document_id is None else _encoded(chunk.document_id)
            self._writer.execute(
                "INSERT INTO chunks (piece, document, collection) VALUES (?, ?, ?)",
                (passage.digest, document, _encoded(chunk.collection)),
            )

    def _write_pieces(self, piece: Context, written: set[bytes]) -> None:
        """Write a piece and those before it, as far as they are new; adds them to ``written``.

        A piece that could not be read is new: it replaces the damaged one.
        """
        new: list[Context] = []
        while piece.digest not in self._pieces and piece.digest not in written:
            new.append(piece)
            written.add(piece.digest)
            piece = piece.before
        self._writer.executemany(
            "INSERT OR REPLACE INTO pieces (name, before, text) VALUES (?, ?, ?)",
            [(one.digest, one.before.digest, _encoded(one.last)) for one in reversed(new)],
        )

    def remove(self, chunks: Iterable[Chunk]) -> None:
        """Delete chunks, if they are there, and the pieces that no other chunk needs."""
        for chunk in dict.fromkeys(chunks):
            self._remove_row(chunk)
            piece = chunk.passage
            while piece and self._writer.execute(DELETE_UNNEEDED, {"name": piece.digest}).rowcount:
                piece = piece.before

    def _remove_row(self, chunk: Chunk) -> None:
        row = self._row_of.get(chunk)
        if row is not None:
            self._writer.execute("DELETE FROM chunks WHERE id = ?", (row,))
            self._writer.execute(
                "INSERT INTO removals (chunk, writer) VALUES (?, ?)", (row, self._name)
            )


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
    """Return stored text; raises ValueError if it is none."""
    if not isinstance(stored, bytes):  # SQLite's columns accept values of any type
        raise ValueError("a value is not text")
    return stored.decode("utf-8", "surrogatepass")


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
