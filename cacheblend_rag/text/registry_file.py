"""The schema of a registry's SQLite file, and checks of the values read from it.

A file may come from anywhere. So no foreign view, trigger or index is run, and an invalid row is
left out instead of failing the reader.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

from cacheblend_rag.text.chunk import Context

VERSION = 2
NO_CONTEXT = 0
TABLES = """
CREATE TABLE texts (id INTEGER PRIMARY KEY AUTOINCREMENT, text BLOB NOT NULL UNIQUE);
CREATE TABLE contexts (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    parent INTEGER NOT NULL,
    text INTEGER NOT NULL,
    UNIQUE (parent, text)
);
CREATE TABLE chunks (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    text INTEGER NOT NULL,
    document BLOB,
    context INTEGER NOT NULL,
    collection BLOB NOT NULL DEFAULT x''
);
CREATE TABLE removals (id INTEGER PRIMARY KEY AUTOINCREMENT, chunk INTEGER NOT NULL);
CREATE INDEX contexts_by_text ON contexts (text);
CREATE INDEX chunks_by_text ON chunks (text);
CREATE INDEX chunks_by_context ON chunks (context)
"""
MOST_BYTES = 64 << 20
"""Of one text, document id or collection."""


class BadRowError(Exception):
    """A row is invalid; the message says why in a few words."""


def open_file(path: str, *, timeout: float) -> sqlite3.Connection:
    """Open a registry's file by its URI, without trusting its schema."""
    file = sqlite3.connect(
        path, timeout=timeout, isolation_level=None, check_same_thread=False, uri=True
    )
    # Our columns hold bytes; SQLite does not check that values stored as text are UTF-8.
    file.text_factory = lambda stored: stored.decode("utf-8", "replace")
    file.execute("PRAGMA trusted_schema = OFF")
    file.execute("PRAGMA cell_size_check = ON")
    return file


def check_schema(file: sqlite3.Connection) -> None:
    """Check that a file has exactly our tables and indexes, besides what SQLite adds itself.

    Raises:
        DatabaseError: for a table that is missing or differs from ours, and for a view, a trigger
            or an index that is not ours.
    """
    ours = {_squeezed(statement) for statement in TABLES.split(";")}
    missing = {statement for statement in ours if statement.startswith("createtable")}
    for kind, name, statement in file.execute("SELECT type, name, sql FROM sqlite_master"):
        if str(name).startswith("sqlite_"):  # a name that SQLite reserves for itself
            continue
        squeezed = _squeezed(str(statement))
        if squeezed not in ours:
            raise sqlite3.DatabaseError(f"its {kind} {str(name)[:40]!r} is not a registry's")
        missing.discard(squeezed)
    if missing:
        raise sqlite3.DatabaseError("a registry's tables are missing")


def _squeezed(statement: str) -> str:
    return "".join(statement.lower().split())


def bounded(column: str) -> str:
    """Return SQL for a column of bytes, which gives 0 for a value of another type.

    Values that are too long are not read.
    """
    is_bytes = f"typeof({column}) = 'blob' AND length({column}) <= {MOST_BYTES}"
    return f"CASE WHEN {column} IS NULL OR {is_bytes} THEN {column} ELSE 0 END"


class RegistryRows:
    """Reads texts and contexts of a file, each once.

    Args:
        file: the file, within a transaction.
        contexts: the contexts known so far; contexts that are read are added.
    """

    def __init__(self, file: sqlite3.Connection, contexts: dict[int, Context]) -> None:
        self._file, self._contexts = file, contexts
        self._texts: dict[int, str] = {}
        self._broken: set[int] = set()

    def text(self, row: object) -> str:
        """Return a stored text; raises BadRowError if it is missing or no text."""
        number = as_number(row, "text")
        if number not in self._texts:
            found = self._file.execute(
                f"SELECT {bounded('text')} FROM texts WHERE id = ?",  # noqa: S608
                (number,),
            ).fetchone()
            if found is None:
                raise BadRowError(f"text {number} is missing")
            self._texts[number] = decoded(found[0])
        return self._texts[number]

    def context(self, row: object) -> Context:
        """Return the pieces of a stored context; raises BadRowError if it is broken."""
        context = as_number(row, "context")
        unknown: list[tuple[int, str]] = []
        try:
            while context not in self._contexts:
                parent, piece = self._context_row(context)
                unknown.append((context, piece))
                context = parent
        except BadRowError:  # and so is every context that needs it
            self._broken.update(known for known, _ in unknown)
            raise
        pieces = self._contexts[context]
        for known, piece in reversed(unknown):
            self._contexts[known] = pieces = pieces.then(piece)
        return pieces

    def _context_row(self, context: int) -> tuple[int, str]:
        """Return a context's parent, which always has a lower id, and its last piece."""
        select = "SELECT parent, text FROM contexts WHERE id = ?"
        found = (
            None if context in self._broken else self._file.execute(select, (context,)).fetchone()
        )
        if found is None:
            raise BadRowError(f"context {context} is broken")
        try:
            parent, piece = as_number(found[0], "context"), self.text(found[1])
        except BadRowError:
            self._broken.add(context)
            raise
        if not NO_CONTEXT <= parent < context:
            self._broken.add(context)
            raise BadRowError(f"context {context} is broken")
        return parent, piece


def as_number(stored: object, what: str) -> int:
    """Return a stored number; raises BadRowError, since SQLite columns accept any type."""
    if not isinstance(stored, int):
        raise BadRowError(f"{what} {str(stored)[:40]!r} is not a number")
    return stored


def decoded(stored: object) -> str:
    """Return stored text; raises BadRowError if it is no UTF-8 text."""
    if not isinstance(stored, bytes):
        raise BadRowError("a value is not text")
    try:
        return stored.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise BadRowError("a text is not UTF-8") from error


def encoded(text: str) -> bytes:
    """Return text as stored bytes."""
    return text.encode("utf-8", "surrogatepass")


def warning_of(bad: Sequence[tuple[int, str]]) -> str:
    """Return a warning about rows of chunks that are left out; it names the first."""
    (row, why), more = bad[0], len(bad) - 1
    also = f", and {more} more" if more else ""
    return f"row {row} of its chunks is left out: {why}{also}"
