"""Chunk KV in an object store: S3-compatible, Google's, Azure's, a folder, or memory.

There is one object per chunk, ``<aa>/<key>.safetensors`` after the prefix, where aa are the chunk
id's first hex digits; ``quarantine/`` holds unusable ones. The object's metadata holds the time at
which the chunk was first stored. Object stores record no last use: each process knows its own.
(``tokens/`` holds what vLLM's connector keeps beside the chunks, see token_objects.py there.)
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from threading import RLock
from typing import Any, ClassVar

from cacheblend_rag.errors import DamagedChunkError
from cacheblend_rag.kv.chunk_kv import KVKey
from cacheblend_rag.kv.codec import ChunkObject
from cacheblend_rag.kv.reader import StoredBytes
from cacheblend_rag.kv.stored_chunk import Entry
from cacheblend_rag.kv.tiers.admission import RejectedError, Resident
from cacheblend_rag.kv.tiers.bytes import SUFFIX, BytesTier, key_of, tensor_of
from cacheblend_rag.kv.tiers.contract import TierPolicy, Usage
from cacheblend_rag.kv.tiers.object_client import TIMEOUT_SECONDS, ObjectClient, bytes_of

QUARANTINE = "quarantine/"
WRITTEN_AT = "writtenat"
"""Name of a chunk's time in its object's metadata: an identifier, since Azure takes no others."""
REMEMBERED = 1 << 16
"""Most chunks whose last use this process remembers."""
LISTED_SECONDS = 60.0
"""Age at which the listing is renewed, since other processes write here, too."""


class ObjectTier(BytesTier):
    """Chunk KV in an object store; with a capacity, the least requested are evicted first.

    A bounded tier uses a listing that is at most a minute old: several processes may each exceed
    the capacity by what they write meanwhile.

    store: of obstore. keeps_metadata: whether objects can have metadata; without it, a chunk's time
    is that of its object.
    """

    fails_whole: ClassVar[bool] = True

    def __init__(
        self,
        store: Any,
        capacity_bytes: int | None = None,
        *,
        keeps_metadata: bool = True,
        name: str = "object",
        policy: TierPolicy | None = None,
    ) -> None:
        super().__init__(name, capacity_bytes, policy=policy)
        self.store, self._keeps_metadata = store, keeps_metadata
        self._times: OrderedDict[KVKey, tuple[float, float]] = OrderedDict()
        self._sizes: dict[KVKey, int] = {}
        self._listed_at = -LISTED_SECONDS
        self._lock = RLock()
        seconds = self.policy.timeout_seconds or TIMEOUT_SECONDS
        self._client = ObjectClient(store, seconds, f"kv-{name}")

    def close(self) -> None:
        """End the thread that waits for answers."""
        self._client.close()

    def entries(self) -> Iterator[tuple[KVKey, Entry]]:
        """Yield all objects; without other times, they have those of the listing."""
        for page in self._client.pages():
            for meta in page:
                if key := _key(meta["path"]):
                    yield key, self._known(key, meta, {})

    def usage(self) -> Usage:
        """Count the chunks of all processes; raises OSError."""
        sizes = [entry.nbytes for _, entry in self.entries()]
        return Usage(len(sizes), sum(sizes))

    def _entry(self, key: KVKey) -> Entry | None:
        found = self._client.answer(self._client.get(_path(key), {"head": True}))
        return None if found is None else self._known(key, found.meta, found.attributes)

    def _read(self, key: KVKey, start: int = 0, end: int | None = None) -> StoredBytes | None:
        options: dict[str, Any] = {}
        if end is not None:
            if end <= start:
                entry = self._entry(key)
                if entry is None:
                    return None
                return StoredBytes(tensor_of(b""), entry.nbytes, entry.written_at)
            options["range"] = (start, end)
        elif start:
            options["range"] = {"offset": start}
        most = None if end is None else end - start
        try:
            return self._client.answer(self._read_range(key, options, most))
        except OSError as error:  # a store refuses to read from an object's end on
            entry = self._entry(key) if "range" in str(error).lower() else None
            if entry is None or entry.nbytes > start:
                raise
            raise DamagedChunkError(f"the object ends at byte {entry.nbytes}") from error

    async def _read_range(
        self, key: KVKey, options: Mapping[str, Any], most: int | None
    ) -> StoredBytes | None:
        """most: requested bytes; None is all."""
        found = await self._client.get(_path(key), options)
        if found is None:
            return None
        entry = self._known(key, found.meta, found.attributes)
        nbytes = found.range[1] - found.range[0]
        if nbytes < 0 or (most is not None and nbytes > most):
            raise DamagedChunkError(f"{nbytes} bytes are answered, of {most} asked for")
        return StoredBytes(await bytes_of(found, nbytes), entry.nbytes, entry.written_at)

    def _mark_used(self, key: KVKey, written_at: float) -> None:
        self._note(key, written_at, time.time())

    def _write(self, key: KVKey, data: ChunkObject, written_at: float) -> None:
        attributes = {WRITTEN_AT: repr(written_at)} if self._keeps_metadata else None
        parts = data.parts()
        # One at a time in a bounded tier: two must not fill the room made for one.
        with nullcontext() if self.capacity_bytes is None else self._lock:
            self._make_room(key, data.nbytes)
            self._client.put(_path(key), parts, attributes)
            self._note(key, written_at, time.time())
            self._sizes[key] = data.nbytes

    def _drop(self, key: KVKey) -> bool:
        is_there = self._entry(key) is not None
        if is_there:
            self._client.delete(_path(key))
        self._forget(key)
        return is_there

    def _set_aside(self, key: KVKey, reason: str) -> None:
        self._client.rename(_path(key), f"{QUARANTINE}{key}.{time.time_ns()}")
        self._forget(key)

    def _known(self, key: KVKey, meta: Mapping[str, Any], attributes: Mapping[str, str]) -> Entry:
        """Return an object's entry, from its metadata, this process's memory and the listing."""
        noted = self._times.get(key)
        written_at = _number(attributes.get(WRITTEN_AT)) or (noted and noted[0])
        written_at = written_at or meta["last_modified"].timestamp()
        return Entry(meta["size"], written_at, noted[1] if noted else written_at)

    def _note(self, key: KVKey, written_at: float, used_at: float) -> None:
        """Remember a chunk's times, of a bounded number of chunks."""
        with self._lock:
            self._times[key] = (written_at, used_at)
            self._times.move_to_end(key)
            while len(self._times) > REMEMBERED:
                self._times.popitem(last=False)

    def _forget(self, key: KVKey) -> None:
        with self._lock:
            self._times.pop(key, None)
            self._sizes.pop(key, None)

    def _make_room(self, key: KVKey, nbytes: int) -> None:
        """Evict until ``nbytes`` fit in place of ``key``; refuses before evicting in vain."""
        if self.capacity_bytes is None:
            return
        entries = self._listed(key, nbytes)
        if entries is None:
            return
        excess = self._held(key) + nbytes - self.capacity_bytes
        order = self._oldest_first(key, entries)
        for victim in self._capacity.evicted_for(key, order, excess=excess, held=len(entries)):
            self._drop(victim)

    def _listed(self, key: KVKey, nbytes: int) -> dict[KVKey, Entry] | None:
        """Return the stored chunks, listed again if a chunk does not fit or the listing is old."""
        fits = self._held(key) + nbytes <= (self.capacity_bytes or 0)
        if fits and time.monotonic() - self._listed_at < LISTED_SECONDS:
            return None
        if not fits and key not in self._sizes and self._capacity.would_reject(key):
            raise RejectedError("another chunk requested as often was rejected just now")
        entries = dict(self.entries())
        self._sizes = {other: entry.nbytes for other, entry in entries.items()}
        self._listed_at = time.monotonic()
        return entries

    def _held(self, key: KVKey) -> int:
        """Return the bytes of all chunks but one, as far as known."""
        return sum(self._sizes.values()) - self._sizes.get(key, 0)

    def _oldest_first(self, key: KVKey, entries: Mapping[KVKey, Entry]) -> list[Resident]:
        order = sorted(entries.items(), key=lambda item: item[1].used_at)
        return [
            Resident(other, entry.nbytes)
            for other, entry in order
            if other != key and other not in self._pinned
        ]


def _path(key: KVKey) -> str:
    return f"{key.chunk_id[:2]}/{key}{SUFFIX}"


def _key(path: str) -> KVKey | None:
    return None if path.startswith(QUARANTINE) else key_of(path.rpartition("/")[2])


def _number(text: str | None) -> float | None:
    """Return the time in an object's metadata; None if it has no possible one."""
    try:
        seconds = float(text) if text else math.nan
    except ValueError:
        return None
    return seconds if math.isfinite(seconds) and seconds >= 0 else None
