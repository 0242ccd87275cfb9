"""Reads the chunk KV of a prompt layer by layer, ahead of its use."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import CancelledError, Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self
from weakref import ReferenceType, ref

from cacheblend_rag.errors import StoreError
from cacheblend_rag.kv.chunk_kv import ChunkKV, KVKey
from cacheblend_rag.kv.opening import Way
from cacheblend_rag.kv.reading import Reservation, SharedReads
from cacheblend_rag.kv.shared_chunk import Found, Part, SharedChunk
from cacheblend_rag.kv.timings import BusySeconds, LayerWait
from cacheblend_rag.reason import Miss


@dataclass
class _Place:
    """One chunk of the prompt. chunk: set while it is open.

    parts: those that are read or being read, by their first layer. taken: the room that they take.
    """

    opened: Future[Found]
    is_settled: bool = False
    chunk: SharedChunk | None = None
    parts: dict[int, Future[Part]] = field(default_factory=dict)
    taken: dict[int, Reservation] = field(default_factory=dict)


class LayerSource:
    """The layers of a prompt's chunks: first the heads, in order, by ``take``; then ``layer``.

    All of it is read on the store's threads, from the start and ahead of its use: layers within
    ``room``, which all prompts of a store share; the next layer to be taken is always read. A layer
    is read of all chunks before the next layer. Use it from one thread at a time, and close it
    unless everything was taken.

    reads: the reads of all prompts of a store. way: the options of this one.
    """

    def __init__(self, keys: Iterable[KVKey], reads: SharedReads, way: Way) -> None:
        self._shared = reads
        self._lock = threading.RLock()
        self._given = self._under_way = 0
        self._todo: list[tuple[int, int]] = []  # parts not yet begun: (first layer, place)
        self._wanted = self._handed = -1
        self._closed = False
        self.busy = BusySeconds()
        self._read_from: dict[str, tuple[BusySeconds, int]] = {}
        self._places = [_Place(reads.begin_open(key, way)) for key in keys]
        for index, place in enumerate(self._places):
            self.busy.watch(place.opened)
            place.opened.add_done_callback(partial(_settle, ref(self), index))

    def __len__(self) -> int:
        """Chunks whose head is not handed out yet."""
        return 0 if self._closed else len(self._places) - self._given

    def awaited(self) -> list[Future[Any]]:
        """Return the reads that the next item, a head or the wanted layer of all chunks, is of."""
        if self._closed:
            return []
        if len(self):
            return [self._places[self._given].opened]
        with self._lock:
            if self._handed >= self._wanted:
                return []
            return [place.parts[first] for place, _, first in self._asked(self._wanted)]

    def wait(self, seconds: float) -> bool:
        """Wait at most so long; returns whether the next item is read, or nothing is left."""
        return not wait(self.awaited(), seconds).not_done

    def take(self) -> Found:
        """Return the next chunk's head, after waiting for it.

        Raises:
            IndexError: nothing is left.
        """
        if not len(self):
            raise IndexError("all chunks are taken")
        opened = self._places[self._given].opened
        self._given += 1
        found = _found(opened)
        self._settle(self._given - 1, opened)
        return found

    def keep(self, used: Sequence[bool]) -> None:
        """Stop reading chunks that are not used; ``used``: a flag for each, in order."""
        with self._lock:
            for place, is_used in zip(self._places, used, strict=True):
                if not is_used:
                    self._let_go(place)

    def want(self, layer: int) -> None:
        """Announce the next layer, so that it is read now, even beyond the limit."""
        with self._lock:
            self._wanted = layer
            for place, chunk, first in self._asked(layer):
                self._begin(place, chunk, first, anyway=True)
            self._read_ahead()

    def waiting(self, layer: int) -> LayerWait:
        """Begin to read a layer; returns the measurement of the wait."""
        with self._lock:
            self.want(layer)
            return LayerWait((c.tier, place.parts[first]) for place, c, first in self._asked(layer))

    def layer(self, layer: int) -> list[ChunkKV | StoreError]:
        """Return one layer of all used chunks, in order, after waiting for them.

        An unreadable chunk is replaced by its error.
        """
        self.want(layer)
        with self._lock:
            asked = self._asked(layer)
        parts = [_part(chunk, place.parts[first], layer) for place, chunk, first in asked]
        with self._lock:
            self._handed = layer
            for place, chunk, first in asked:
                if layer + 1 == chunk.last_of(first):
                    self._give_back(place, first)
            self._read_ahead()
        return parts

    def in_memory(self) -> list[ChunkKV] | None:
        """Return the used chunks, in order, as their tiers hold them, instead of their layers.

        None unless all of them are in memory in the prompt's form.
        """
        with self._lock:
            used = [place.chunk for place in self._places if place.chunk is not None]
        found = [chunk.in_memory for chunk in used]
        whole = [kv for kv in found if kv is not None]
        return None if self._closed or len(whole) < len(found) else whole

    def is_read(self, layer: int) -> bool:
        """Return whether one layer of all used chunks has been read."""
        with self._lock:
            asked = [place.parts.get(first) for place, _, first in self._asked(layer)]
        return not self._closed and all(part is not None and part.done() for part in asked)

    def is_all_read(self) -> bool:
        """Return whether all remaining layers of the used chunks have been read.

        Then ``layer`` neither waits nor returns errors until ``rewind``.
        """
        with self._lock:
            used = [(place, place.chunk) for place in self._places if place.chunk is not None]
            return not self._closed and all(self._has_rest(*each) for each in used)

    def _has_rest(self, place: _Place, chunk: SharedChunk) -> bool:
        layers = chunk.reader.layers
        first = layers if self._handed + 1 == layers else chunk.first_of(self._handed + 1)
        while first < layers and not chunk.needs_no_read:
            part = place.parts.get(first)
            if part is None or not part.done() or part.cancelled() or part.exception():
                return False
            first = chunk.last_of(first)
        return True

    def measured(self) -> dict[str, tuple[int, float]]:
        """Return the bytes read from each tier, and the seconds of reading.

        For memory, only unpacking counts.
        """
        with self._lock:
            return {tier: (nbytes, busy.total) for tier, (busy, nbytes) in self._read_from.items()}

    def rewind(self) -> None:
        """Start again with the first layer."""
        with self._lock:
            self._wanted = self._handed = -1
            for index, place in enumerate(self._places):
                for first in list(place.parts):
                    self._give_back(place, first)
                if place.chunk is not None:
                    self._queue(index, place.chunk, 0)
            self._todo = sorted(set(self._todo))
            self._read_ahead()

    def close(self) -> None:
        """Stop: reads in flight are finished and dropped."""
        with self._lock:
            self._closed = True
            for place in self._places:
                place.opened.cancel()
                self._let_go(place)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _settle(self, index: int, opened: Future[Found]) -> None:
        """Begin to read a chunk's layers once it is open; called by the first to notice."""
        place, found = self._places[index], _found(opened)
        with self._lock:
            if place.is_settled or self._closed:
                return
            place.is_settled, place.chunk = True, found.chunk
            if found.chunk is not None:
                found.chunk.join()
                self._queue(index, found.chunk, 0)
            self._read_ahead()

    def _asked(self, layer: int) -> list[tuple[_Place, SharedChunk, int]]:
        """Return the used chunks, each with the first layer of the part that holds a layer."""
        return [
            (place, place.chunk, place.chunk.first_of(layer))
            for place in self._places
            if place.chunk is not None
        ]

    def _queue(self, index: int, chunk: SharedChunk, first: int) -> None:
        if first < chunk.reader.layers:
            heapq.heappush(self._todo, (first, index))

    def _read_ahead(self) -> None:
        """Begin to read the next parts, as far as there is room; under the lock.

        Not all at once, so that those of the first layers are not behind others in the queue; and
        until all heads are known, first parts only. Heads count as reads: without them nothing can
        be computed, and if reading takes processors, parts would delay them.
        """
        heads = sum(not place.is_settled for place in self._places)
        while self._todo and (not heads or not self._todo[0][0]):
            first, index = heapq.heappop(self._todo)
            place = self._places[index]
            if (chunk := place.chunk) is None:
                continue
            if self._under_way + heads >= chunk.at_once:
                self._queue(index, chunk, first)
                return
            is_past = chunk.last_of(first) <= max(self._handed + 1, self._wanted)
            if not is_past and not self._begin(place, chunk, first, anyway=False):
                self._queue(index, chunk, first)
                return
            self._queue(index, chunk, chunk.last_of(first))

    def _begin(self, place: _Place, chunk: SharedChunk, first: int, *, anyway: bool) -> bool:
        """Begin to read a part; returns whether the limit allows it."""
        if first in place.parts:
            return True
        nbytes = chunk.part_bytes(first)
        taken = self._shared.room.take(nbytes, anyway=anyway)
        if taken is None:
            return False
        place.taken[first] = taken
        place.parts[first] = future = chunk.begin(
            first, partial(self._shared.begin_read, chunk.tier)
        )
        if not future.done():
            self._under_way += 1
            self.busy.watch(future)
            busy, before = self._read_from.get(chunk.tier, (BusySeconds(), 0))
            self._read_from[chunk.tier] = (busy, before + nbytes)
            busy.watch(future)
            future.add_done_callback(partial(_is_read, ref(self)))
        return True

    def _give_back(self, place: _Place, first: int) -> None:
        """Drop a part; its bytes are released at the latest when it has been read."""
        taken, future = place.taken.pop(first), place.parts.pop(first)
        future.add_done_callback(taken.give_back)

    def _let_go(self, place: _Place) -> None:
        chunk, place.chunk = place.chunk, None
        if chunk is not None:
            for first in list(place.parts):
                self._give_back(place, first)
            chunk.leave()


def _settle(source: ReferenceType[LayerSource], index: int, opened: Future[Found]) -> None:
    if (there := source()) is not None:
        there._settle(index, opened)


def _is_read(source: ReferenceType[LayerSource], _: Future[Part]) -> None:
    if (there := source()) is not None:
        with there._lock:
            there._under_way -= 1
            if not there._closed:
                there._read_ahead()


def _found(opened: Future[Found]) -> Found:
    try:
        return opened.result()
    except (CancelledError, StoreError):  # the store was closed meanwhile
        return Found(None, Miss.STORE_ERROR)


def _part(chunk: SharedChunk, future: Future[Part], layer: int) -> ChunkKV | StoreError:
    try:
        return future.result().layer(layer)
    except CancelledError:  # the store was closed meanwhile
        return StoreError("the store was closed")
    except StoreError as error:
        return chunk.failure or error
