"""The file that keeps the tokens of stored chunks beside their KV, for restarts and for replicas.

Nothing in it is trusted: a row's tokens must have the hash that names them, and its other values
must be hashes and known names. What is found by it is still looked up in the store, whose KV has
checks of its own.

Its journal is SQLite's ordinary one, since write-ahead logs do not work on network file systems.
"""

from __future__ import annotations

import hashlib
import re
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from cacheblend_rag.engines.vllm.protocol import SentLeadIn
from cacheblend_rag.settings import LeadInKind
from cacheblend_rag.text.registry_file import open_file

FILE_NAME = "tokens.sqlite"
WAIT_SECONDS = 10.0
MOST_TOKENS = 1 << 20
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
_HASH = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, slots=True)
class Name:
    """What a stored chunk is found and looked up by.

    namespace: its namespace_id. chunk_id, context_id: of its KV's key. lead_in: that it was
    computed after.
    """

    namespace: str
    chunk_id: str
    context_id: str
    lead_in: SentLeadIn


@dataclass(frozen=True, slots=True, eq=False)
class StoredTokens:
    """A stored chunk: tokens (tokens,) uint32; follows: id of the chunk before it, or ""."""

    name: Name
    tokens: NDArray[np.uint32]
    follows: str = ""


def id_of(tokens: NDArray[np.uint32]) -> str:
    """Return the chunk id, as kv/chunk_kv.py's ``chunk_id`` does, many times faster."""
    return hashlib.blake2b(tokens.astype("<u4").tobytes(), digest_size=16).hexdigest()


class TokenFile:
    """The chunks of one model in a file; other processes may change it at any time.

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
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
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

    def add(self, stored: Iterable[StoredTokens], fresh: Iterable[Name] = ()) -> None:
        """Write chunks that are missing; those of ``fresh`` as new ones, even if they are there."""
        if self.read_only:
            return
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

    def discard(self, names: Iterable[Name]) -> None:
        """Remove chunks."""
        if not self.read_only:
            with self._writing():
                self._delete(names)

    def news(self) -> Iterator[Mapping[int, StoredTokens | None]]:
        """Yield what was removed and added since the last call, this object's changes included.

        Each yields rows by their numbers: a chunk, or None if it was removed. Invalid rows are left
        out.
        """
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
            read = ((number, _read(row)) for number, *row in rows)
            yield {number: one for number, one in read if one is not None}
        self._seen, self._changes = version, self._file.total_changes

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


def _read(row: Sequence[object]) -> StoredTokens | None:
    """Return the chunk of a row, None if the row is invalid."""
    namespace, chunk, context, lead, lead_tokens, window, follows, blob = row
    hashes, optional = (namespace, chunk), (context, lead_tokens, follows)
    if not isinstance(blob, bytes) or not blob or len(blob) % 4:
        return None
    if not all(isinstance(one, str) and _HASH.fullmatch(one) for one in hashes):
        return None
    if not all(one == "" or (isinstance(one, str) and _HASH.fullmatch(one)) for one in optional):
        return None
    if lead not in get_args(LeadInKind) or type(window) is not int or window < 0:
        return None
    tokens = np.frombuffer(blob, "<u4").astype(np.uint32)
    if id_of(tokens) != chunk or int(tokens.max()) >= 1 << 31:
        return None
    name = Name(
        str(namespace), str(chunk), str(context), SentLeadIn(str(lead), str(lead_tokens), window)
    )
    return StoredTokens(name, tokens, str(follows))
