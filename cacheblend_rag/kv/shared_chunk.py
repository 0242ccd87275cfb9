"""A stored chunk that several prompts read at the same time, each part once."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from weakref import WeakValueDictionary

from cacheblend_rag.errors import DamagedChunkError, ForeignChunkError, StoreError
from cacheblend_rag.kv.chunk_kv import ChunkKV
from cacheblend_rag.kv.reader import ChunkReader, WholeReader
from cacheblend_rag.reason import Reason

PARTS_AT_ONCE = 16
"""Most reads in flight per prompt if reading is waiting: heads first, then parts."""

Submit = Callable[[Callable[[], "Part"]], "Future[Part]"]
"""Runs work on one of the store's threads."""


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class Part:
    """Some layers of a chunk that were read together, ``first`` the first of them."""

    first: int
    kv: ChunkKV

    def layer(self, index: int) -> ChunkKV:
        """Return one layer of the chunk."""
        return self.kv.layer(index - self.first)


class SharedChunk:
    """A chunk whose parts are each read once while any prompt uses it.

    reader: its head. tier: where it was found. read: reads layers first to last - 1; raises
    StoreError. keep: called with the whole chunk once all of it was read, on the store's threads;
    without it, only prompts hold the parts. at_once: most reads in flight of a prompt for which it
    reads ahead here. unpacks: whether layers are returned as numbers of the model's type, unpacked
    on the store's threads; the kept chunk stays packed. only_unpacks: whether unpacking needs no
    read. failure: why it could not be read.
    """

    def __init__(
        self,
        reader: ChunkReader,
        tier: str,
        read: Callable[[int, int], ChunkKV],
        keep: Callable[[ChunkKV], None] | None = None,
        *,
        at_once: int = PARTS_AT_ONCE,
        unpacks: bool = True,
    ) -> None:
        self.reader, self.tier = reader, tier
        self._unpacks = unpacks and reader.precision != "native"
        self.only_unpacks = self._unpacks and reader.in_memory
        self.at_once = at_once
        self._read, self._keep, self._is_held = read, keep, False
        self._lock = threading.RLock()  # reentrant: cancelling a read runs its callbacks
        self._users = 0
        self._under_way: dict[int, Future[Part]] = {}
        self._held: WeakValueDictionary[int, Part] = WeakValueDictionary()
        self._kept: dict[int, Part] = {}
        self._whole: ChunkKV | None = None
        self.failure: StoreError | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all layers, in memory or once they are read."""
        if isinstance(self.reader, WholeReader):
            return self.reader.kv.nbytes
        return self.reader.layers * self.reader.layer_bytes

    def hold(self) -> None:
        """Keep the parts read from now on as long as this object lives."""
        with self._lock:
            self._is_held = True

    @property
    def needs_no_read(self) -> bool:
        """Whether all layers are in memory in the prompt's form."""
        return not self._unpacks and (self.reader.in_memory or self._whole is not None)

    @property
    def in_memory(self) -> ChunkKV | None:
        """The chunk as its tier holds it, if that is memory and the prompt's form; else None."""
        if isinstance(self.reader, WholeReader) and not self._unpacks:
            return self.reader.kv
        return None

    def first_of(self, layer: int) -> int:
        """Return the first layer of the part that a layer is in."""
        starts = self.reader.starts
        return starts[bisect_right(starts, layer) - 1]

    def last_of(self, first: int) -> int:
        """Return the layer after the part that begins with ``first``."""
        starts = self.reader.starts
        after = bisect_right(starts, first)
        return starts[after] if after < len(starts) else self.reader.layers

    def part_bytes(self, first: int) -> int:
        """Return the memory for reading or unpacking a part, in bytes."""
        if self.reader.in_memory and not self._unpacks:
            return 0
        return (self.last_of(first) - first) * self.reader.layer_bytes

    def join(self) -> None:
        """Register a reader, until ``leave``."""
        with self._lock:
            self._users += 1

    def leave(self) -> None:
        """Unregister a reader; without readers, parts not begun are not read."""
        with self._lock:
            self._users -= 1
            for future in [] if self._users else list(self._under_way.values()):
                future.cancel()

    def begin(self, first: int, submit: Submit) -> Future[Part]:
        """Begin to read a part, unless it has been read or is being read."""
        with self._lock:
            there = self._held.get(first)
            if there is None and not self._unpacks:
                there = self._stored(first)
            if there is not None:
                return _done(there)
            if first in self._under_way:
                return self._under_way[first]
            future = submit(lambda: self._read_part(first))
            self._under_way[first] = future
        future.add_done_callback(lambda _: self._end(first))
        return future

    def _stored(self, first: int) -> Part | None:
        """Return a part as stored, if no read is needed."""
        last = self.last_of(first)
        if self._whole is not None:
            return Part(first, self._whole.part(first, last))
        if self.reader.in_memory:
            return Part(first, self.reader.read(first, last))
        return self._kept.get(first)

    def _read_part(self, first: int) -> Part:
        if self.failure is not None:  # quarantined by now: asking for it is useless
            raise self.failure
        with self._lock:
            stored = self._stored(first)
        if stored is None:
            stored = self._read_stored(first)
        part = Part(first, stored.kv.unpacked()) if self._unpacks else stored
        with self._lock:
            self._held[first] = part
        return part

    def _read_stored(self, first: int) -> Part:
        """Read a part; after the last one, hand the chunk to ``keep``."""
        try:
            part = Part(first, self._read(first, self.last_of(first)))
        except StoreError as error:
            self._fail(error)
            raise
        with self._lock:
            if self._keep is None and not self._is_held:
                return part
            self._kept[first] = part
            is_whole = sum(one.kv.shape[0] for one in self._kept.values()) == self.reader.layers
            if self._keep is None or not is_whole:
                return part
            keep, self._keep = self._keep, None
        keep(self._assembled())
        return part

    def _fail(self, error: StoreError) -> None:
        """Record why it cannot be read; damage takes precedence over a later absence."""
        with self._lock:
            is_cause = isinstance(error, DamagedChunkError | ForeignChunkError)
            if self.failure is None or is_cause:
                self.failure = error

    def _assembled(self) -> ChunkKV:
        """Join all parts; later reads use the joined chunk."""
        whole = ChunkKV.joined([self._kept[first].kv for first in sorted(self._kept)])
        with self._lock:
            self._whole = whole
            self._kept.clear()
        return whole

    def _end(self, first: int) -> None:
        with self._lock:
            self._under_way.pop(first, None)


@dataclass(frozen=True, slots=True)
class Found:
    """The result of looking a chunk up: the chunk, or the reason why there is none.

    failed: name of the tier that could not be read, if that is the reason.
    """

    chunk: SharedChunk | None
    reason: Reason | None
    failed: str | None = None

    @property
    def head(self) -> ChunkReader | None:
        """The chunk's reader, with its head but without its layers; None on a miss."""
        return None if self.chunk is None else self.chunk.reader

    @property
    def tier(self) -> str | None:
        """Name of the tier where it was found, or that could not be read."""
        return self.failed if self.chunk is None else self.chunk.tier


def _done(part: Part) -> Future[Part]:
    future: Future[Part] = Future()
    future.set_result(part)
    return future
