"""A new tier: chunk KV in a table of a database, here SQLite. Copy it for a place of your own.

``TransformersEngine(model, store=TieredKVStore([HostTier(), TableTier("chunks.sqlite")]))`` reads
from memory first. Whatever these methods raise becomes a miss, or a chunk that is not stored.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator

from cacheblend_rag.kv import BytesTier, Entry, KVKey, TierPolicy
from cacheblend_rag.kv.codec import ChunkObject
from cacheblend_rag.kv.reader import StoredBytes
from cacheblend_rag.kv.tiers.bytes import tensor_of

TABLE = "CREATE TABLE IF NOT EXISTS chunks (key TEXT PRIMARY KEY, written REAL, data BLOB)"


class TableTier(BytesTier):
    """Chunk KV as rows: a key, when the chunk was first stored, and its bytes."""

    def __init__(self, path: str, *, name: str = "table", policy: TierPolicy | None = None) -> None:
        super().__init__(name, policy=policy)
        self._file = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._file.execute(TABLE)

    def _entry(self, key: KVKey) -> Entry | None:
        found = self._read(key, 0, 0)
        return found and Entry(found.total, found.written_at, found.written_at)

    def entries(self) -> Iterator[tuple[KVKey, Entry]]:
        rows = self._file.execute("SELECT key, LENGTH(data), written FROM chunks")
        for name, nbytes, written in rows.fetchall():
            yield KVKey.parse(name), Entry(nbytes, written, written)

    def _read(self, key: KVKey, start: int, end: int) -> StoredBytes | None:
        row = self._file.execute(
            "SELECT SUBSTR(data, ?, ?), LENGTH(data), written FROM chunks WHERE key = ?",
            [start + 1, end - start, str(key)],
        ).fetchone()
        return None if row is None else StoredBytes(tensor_of(row[0]), row[1], row[2])

    def _write(self, key: KVKey, data: ChunkObject, written_at: float) -> None:
        row = [str(key), written_at, b"".join(data.parts())]
        self._file.execute("REPLACE INTO chunks VALUES (?, ?, ?)", row)

    def _drop(self, key: KVKey) -> bool:
        gone = self._file.execute("DELETE FROM chunks WHERE key = ?", [str(key)])
        return gone.rowcount > 0

    def close(self) -> None:
        self._file.close()
