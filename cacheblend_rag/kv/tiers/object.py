"""Chunk KV in an object store: S3-compatible, Google's, Azure's, a folder, or memory.

There is one object per chunk, ``<aa>/<key>.safetensors`` after the prefix, where aa are the chunk
id's first hex digits; ``quarantine/`` holds unusable ones. The object's metadata holds the time at
which the chunk was first stored, which listings lack; object stores record no last use.
(``tokens/`` holds what engines/catalog_places.py keeps beside the chunks.)
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from cacheblend_rag.errors import DamagedChunkError
from cacheblend_rag.kv.chunk_kv import KVKey
from cacheblend_rag.kv.codec import ChunkObject
from cacheblend_rag.kv.reader import StoredBytes
from cacheblend_rag.kv.stored_chunk import Entry
from cacheblend_rag.kv.tiers.bytes import BytesTier, key_of, path_of
from cacheblend_rag.kv.tiers.object_client import ObjectClient, bytes_of
from cacheblend_rag.kv.tiers.policy import TierPolicy

QUARANTINE = "quarantine/"
WRITTEN_AT = "writtenat"
"""Name of a chunk's time in its object's metadata: an identifier, since Azure takes no others."""


class ObjectTier(BytesTier):
    """Chunk KV in an object store, which knows no capacity.

    store: of obstore. keeps_metadata: whether objects can have metadata; without it, a chunk's time
    is that of its object.
    """

    fails_whole: ClassVar[bool] = True

    def __init__(
        self,
        store: Any,
        *,
        keeps_metadata: bool = True,
        name: str = "object",
        policy: TierPolicy | None = None,
    ) -> None:
        super().__init__(name, policy=policy)
        self.store, self._keeps_metadata = store, keeps_metadata
        self._client = ObjectClient(store)

    def entries(self) -> Iterator[tuple[KVKey, Entry]]:
        """Yield all objects, with the times of the listing."""
        for page in self._client.pages():
            for meta in page:
                if key := _key(meta["path"]):
                    yield key, _known(meta, {})

    def _entry(self, key: KVKey) -> Entry | None:
        with self._client.asking():
            found = self._client.get(path_of(key), {"head": True})
        return None if found is None else _known(found.meta, found.attributes)

    def _read(self, key: KVKey, start: int, end: int) -> StoredBytes | None:
        try:
            with self._client.asking():
                found = self._client.get(path_of(key), {"range": (start, end)})
                if found is None:
                    return None
                nbytes = found.range[1] - found.range[0]
                if not 0 <= nbytes <= end - start:
                    raise DamagedChunkError(f"{nbytes} bytes are answered, of {end - start}")
                entry = _known(found.meta, found.attributes)
                return StoredBytes(bytes_of(found, nbytes), entry.nbytes, entry.written_at)
        except OSError as error:  # a store refuses to read from an object's end on
            there = self._entry(key) if "range" in str(error).lower() else None
            if there is None or there.nbytes > start:
                raise
            raise DamagedChunkError(f"the object ends at byte {there.nbytes}") from error

    def _write(self, key: KVKey, data: ChunkObject, written_at: float) -> None:
        attributes = {WRITTEN_AT: repr(written_at)} if self._keeps_metadata else None
        self._client.put(path_of(key), data.parts(), attributes)

    def _drop(self, key: KVKey) -> bool:
        is_there = self._entry(key) is not None
        if is_there:
            self._client.delete(path_of(key))
        return is_there

    def _set_aside(self, key: KVKey) -> None:
        self._client.rename(path_of(key), f"{QUARANTINE}{key}.{time.time_ns()}")


def _known(meta: Mapping[str, Any], attributes: Mapping[str, str]) -> Entry:
    """Return an object's entry, from its own metadata if it has a time there."""
    written_at = _number(attributes.get(WRITTEN_AT)) or meta["last_modified"].timestamp()
    return Entry(meta["size"], written_at, written_at)


def _key(path: str) -> KVKey | None:
    return None if path.startswith(QUARANTINE) else key_of(path.rpartition("/")[2])


def _number(text: str | None) -> float | None:
    """Return the time in an object's metadata; None if it has no possible one."""
    try:
        seconds = float(text) if text else math.nan
    except ValueError:
        return None
    return seconds if math.isfinite(seconds) and seconds >= 0 else None
