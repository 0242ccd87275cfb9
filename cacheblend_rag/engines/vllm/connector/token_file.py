"""The file that keeps the tokens of stored chunks beside their KV, for restarts and for replicas.

Nothing in it is trusted, see stored_tokens.py.

Its journal is SQLite's ordinary one, since write-ahead logs do not work on network file systems.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from cacheblend_rag.engines.vllm.connector.stored_tokens import (
    MOST_TOKENS,
    Name,
    Row,
    StoredTokens,
    checked,
)
from cacheblend_rag.folders import make_folder
from cacheblend_rag.text.registry_file import open_file

FILE_NAME = "tokens.sqlite"
WAIT_SECONDS = 10.0
KEPT_REMOVALS = 100_000
"""Removals that other engines may still have to read; more than a look's worth by far."""
ROWS_AT_ONCE = 8192
TABLES = (
    """CREATE TABLE IF NOT EXISTS chunks (
    id INTEGER PRIMARY KEY AUTOINCREMENT, model TEXT NOT NULL, namespace TEXT NOT NULL,
    chunk TEXT NOT NULL, context TEXT NOT NULL, lead TEXT NOT NULL, lead_tokens TEXT NOT NULL,
    lead_window INTEGER NOT NULL, follows TEXT NOT NULL, tokens BLOB NOT NULL,
    UNIQUE (model, namespace, chunk, context, lead, lead_tokens, lead_window))""",
    """CREATE TABLE IF NOT EXISTS removals (
    id INTEGER PRIMARY KEY AUTOINCREMENT, chunk INTEGER NOT NULL)""",
)


class TokenFile:
    """The chunks of one model in a file, a TokenLog; other processes may change it at any time.

    Its methods raise sqlite3.Error and OSError.

    Args:
        path: the file, made unless it is only read.
        model: what the KV depends on beside tokens, namespace and lead-in, as a hash.
        read_only: whether it is only read.
    """

    def __init__(self, path: Path, model: str, *, read_only: bool = False) -> None:
        self.path, self.read_only, self._model = path, read_only, model
        self._last_chunk = self._last_removal = 0
        self._seen = self._changes = -1
        if not read_only:
            make_folder(path.parent)
            path.touch(mode=0o600)
        uri = f"{path.absolute().as_uri()}?mode={'ro' if read_only else 'rw'}"
        self._file = open_file(uri, timeout=WAIT_SECONDS)
        try:
            if not read_only:
                self._file.execute("PRAGMA secure_delete = ON")
                with self._writing():
                    for table in TABLES:
                        self._file.execute(table)
            self._last_removal = self._newest("removals")
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def add(self, stored: Sequence[StoredTokens], fresh: Collection[Name] = ()) -> bool:
        """Write chunks that are missing, as TokenLog says."""
        if self.read_only:
            return False
        with self._writing():
            self._delete(fresh)
            self._file.executemany(
                "INSERT OR IGNORE INTO chunks (model, namespace, chunk, context, lead, "
                "lead_tokens, lead_window, follows, tokens) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    (*self._key(one.name), one.follows, one.tokens.astype("<u4").tobytes())
                    for one in stored
                ),
            )
        return True

    def discard(self, names: Collection[Name]) -> None:
        """Remove chunks."""
        if not self.read_only:
            with self._writing():
                self._delete(names)

    def news(self) -> Iterator[Mapping[Row, StoredTokens | None]]:
        """Yield what was removed and added since the last call, as TokenLog says."""
        (version,) = self._file.execute("PRAGMA data_version").fetchone()
        if version == self._seen and self._file.total_changes == self._changes:
            return
        select = "SELECT id, chunk FROM removals WHERE id > ? ORDER BY id"
        removals = self._file.execute(select, (self._last_removal,)).fetchall()
        if removals:
            self._last_removal = removals[-1][0]
            yield {row: None for _, row in removals if isinstance(row, int)}
        while rows := self._rows():
            self._last_chunk = rows[-1][0]
            read = ((number, checked(row)) for number, *row in rows)
            yield {number: one for number, one in read if one is not None}
        self._seen, self._changes = version, self._file.total_changes

    def has_lost(self) -> bool:
        """Return False: reading a SQLite file that lost rows raises an error instead."""
        return False

    def _rows(self) -> list[tuple[Any, ...]]:
        return self._file.execute(
            "SELECT id, namespace, chunk, context, lead, lead_tokens, lead_window, follows, "
            "CASE WHEN length(tokens) <= ? THEN tokens END "
            "FROM chunks WHERE id > ? AND model = ? ORDER BY id LIMIT ?",
            (4 * MOST_TOKENS, self._last_chunk, self._model, ROWS_AT_ONCE),
        ).fetchall()

    def _newest(self, table: str) -> int:
        select = f"SELECT coalesce(max(id), 0) FROM {table}"  # noqa: S608
        return int(self._file.execute(select).fetchone()[0])

    def _key(self, name: Name) -> tuple[str | int, ...]:
        lead = name.lead_in
        own = (self._model, name.namespace, name.chunk_id, name.context_id)
        return (*own, lead.name, lead.tokens, lead.window)

    def _delete(self, names: Iterable[Name]) -> None:
        where = (
            "WHERE model = ? AND namespace = ? AND chunk = ? AND context = ? AND lead = ? "
            "AND lead_tokens = ? AND lead_window = ?"
        )
        for name in names:
            key = self._key(name)
            self._file.execute(
                f"INSERT INTO removals (chunk) SELECT id FROM chunks {where}",  # noqa: S608
                key,
            )
            self._file.execute(f"DELETE FROM chunks {where}", key)  # noqa: S608
        self._file.execute(
            "DELETE FROM removals WHERE id <= (SELECT max(id) FROM removals) - ?",
            (KEPT_REMOVALS,),
        )

    @contextmanager
    def _writing(self) -> Iterator[None]:
        self._file.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._file.execute("COMMIT")
        except BaseException:
            with suppress(sqlite3.Error):
                self._file.execute("ROLLBACK")
            raise
