"""Loads stored chunks into a blend pass, each layer just before it is needed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from cacheblend_rag.blend.copy_stream import (
    Event,
    PinnedBuffers,
    has_copy_stream,
    pinned_buffers_of,
)
from cacheblend_rag.blend.fused import FusedKV
from cacheblend_rag.blend.layer_part import LayerPart, Sendable, WholePart, sendable
from cacheblend_rag.blend.placement import place_parts
from cacheblend_rag.blend.rotary import Rotation
from cacheblend_rag.blend.stack import DecoderStack, on_all_ranks
from cacheblend_rag.blend.steps import Steps
from cacheblend_rag.blend.transfer import Laying, Upload
from cacheblend_rag.errors import StoreError
from cacheblend_rag.kv.chunk_kv import KVKey
from cacheblend_rag.kv.fetch import LayerSource, Threshold
from cacheblend_rag.kv.packed_kv import LayerKV
from cacheblend_rag.kv.reader import ChunkReader
from cacheblend_rag.kv.shared_chunk import Found
from cacheblend_rag.kv.store import TieredKVStore
from cacheblend_rag.kv.stored_chunk import miss_of
from cacheblend_rag.kv.timings import LayerWait
from cacheblend_rag.prefill.stopwatch import Stopwatch
from cacheblend_rag.report import MissReason

WAIT_SECONDS = 0.001
"""How long a step waits for a layer before other work may run."""


def begin_reading(
    store: TieredKVStore,
    keys: Iterable[KVKey],
    stack: DecoderStack,
    *,
    promote: bool = True,
    threshold: Threshold | None = None,
) -> LayerSource:
    """Begin to read chunks for a pass; they stay packed if its device unpacks them.

    promote, threshold: see ``TieredKVStore.fetch``.
    """
    unpack = not has_copy_stream(stack.geometry.device)
    return store.fetch(keys, promote=promote, unpack=unpack, threshold=threshold)


class LostChunkError(Exception):
    """A chunk turned out to be unreadable: the pass must start again without it."""


@dataclass
class LoadedChunk:
    """A chunk, or a run of its tokens, to copy to positions [start, end).

    skip, beyond: tokens of the chunk before and after the run, whose KV is left out. tier, reason:
    where it was found, or why it is a miss on this rank. is_used: whether all ranks have it.
    turn: the rotation of its keys, None if they were computed at these positions.
    """

    start: int
    end: int
    skip: int = 0
    beyond: int = 0
    head: ChunkReader | None = None
    tier: str | None = None
    reason: MissReason | None = None
    is_used: bool = False
    turn: Rotation | None = None

    @property
    def whole_tokens(self) -> int:
        """Number of the stored chunk's tokens."""
        return self.skip + self.end - self.start + self.beyond

    @property
    def own(self) -> slice:
        """The indices of the run's tokens in the stored chunk."""
        return slice(self.skip, self.skip + self.end - self.start)

    @property
    def whole_start(self) -> int:
        """Position of the stored chunk's first token, if it were copied."""
        return self.start - self.skip

    def part(self, kv: LayerKV) -> Sendable:
        """Return the run's part of one layer of the chunk, not copied."""
        part = sendable(kv)
        if not self.skip and not self.beyond:
            return part
        return part.cut(self.own.start, self.own.stop)


class ChunkLoader:
    """Copies chunks into the buffer of a pass, the same on all ranks.

    chunks: with their destinations, in the order of ``source``. fused: the buffer, set by ``into``;
    finding chunks needs none. watch: gets the times of waiting for layers, and of copying them.

    On a GPU a layer is copied on the copy stream, and the compute stream waits for it; while a
    layer is computed, the next one is copied if it has been read.

    Ranks agree on each layer until all of them have read every layer: no chunk can be lost then,
    and each waits for its own copies only.
    """

    fused: FusedKV

    def __init__(
        self,
        stack: DecoderStack,
        chunks: Sequence[LoadedChunk],
        source: LayerSource,
        watch: Stopwatch | None = None,
    ) -> None:
        self.stack, self.source = stack, source
        self.chunks = chunks
        self._laid: set[int] = set()
        self.watch = watch or Stopwatch(stack.geometry.device)
        self._buffers = pinned_buffers_of(stack.geometry.device)
        self._parts: list[LayerKV | StoreError] | None = None
        self._upload: Upload | None = None
        self._free: Event | None = None
        self._used: list[LoadedChunk] = []
        self._tiers: list[str] = []
        self._planned: Laying | None = None
        self._is_planned = False
        self._queued: tuple[int, Event] | None = None
        self._all_read = False

    def into(self, fused: FusedKV) -> Self:
        """Set the buffer that chunks are copied into; returns this object."""
        self.fused = fused
        return self

    def heads(self) -> Steps[None]:
        """Find out which chunks all ranks have; yields after each, and while waiting."""
        for chunk in self.chunks:
            self._take(chunk, self.source.take())
            yield
        sound = [chunk.reason is None for chunk in self.chunks]
        here = [self.source.is_all_read(), *sound]
        self._all_read, *sound = on_all_ranks(self.stack, here)
        self._use(sound)

    def _take(self, chunk: LoadedChunk, found: Found) -> None:
        head = found.head
        chunk.tier, chunk.reason = found.tier, found.reason
        if head is None:
            return
        if not self.stack.geometry.fits(head.shape, head.dtype, chunk.whole_tokens):
            chunk.tier, chunk.reason = None, "damaged"
            return
        chunk.head = head
        if chunk.whole_start != head.position:
            chunk.turn = self.stack.rotation(chunk.whole_start - head.position)

    def _use(self, used: Sequence[bool]) -> None:
        """Use some of the chunks, the same on all ranks."""
        for chunk, is_used in zip(self.chunks, used, strict=True):
            chunk.is_used = is_used
        self._used = [chunk for chunk in self.chunks if chunk.is_used]
        self._tiers = list(dict.fromkeys(chunk.tier or "" for chunk in self._used))
        self._planned, self._is_planned = None, False
        self.source.keep(used)

    def leave_out(self, unwanted: Sequence[LoadedChunk]) -> None:
        """Drop chunks that are computed faster than loaded, the same on all ranks."""
        for chunk in unwanted:
            chunk.reason = "slow"
        self._use_without(unwanted)

    def _use_without(self, gone: Sequence[LoadedChunk]) -> None:
        left = {id(chunk) for chunk in gone}
        self._use([chunk.is_used and id(chunk) not in left for chunk in self.chunks])

    def load(self, layer: int) -> Steps[None]:
        """Copy one layer of all chunks into the buffer, once; yields while it waits for it.

        Raises LostChunkError, on all ranks, when a chunk cannot be read any more.
        """
        used = self._used
        if layer in self._laid or not used:
            return
        if (laying := self._laying()) is not None:
            yield from self._lay(laying, layer)
        else:
            yield from self._copy(layer, used)
        self._laid.add(layer)

    def _copy(self, layer: int, used: Sequence[LoadedChunk]) -> Steps[None]:
        """Copy one layer of all chunks once it is read, and begin with the next one on a GPU."""
        if self._parts is None:
            wait = self.source.waiting(layer)
        else:
            wait = LayerWait((chunk.tier or "", None) for chunk in used)

        def look() -> bool:
            if self._parts is None and self.source.wait(WAIT_SECONDS):
                self._parts = self.source.layer(layer)
            return self._parts is not None and self._is_sent(layer, used, self._parts)

        yield from self._until_there(wait, look)
        parts = [part for part in self._parts or () if not isinstance(part, StoreError)]
        self._parts = None
        if self._buffers is None:
            with self.watch.laying():
                place_parts(self.fused, layer, _placed(layer, used, parts))
        else:
            self._arrive()
            self._look_ahead(self._buffers, layer + 1, used)

    def _until_there(self, wait: LayerWait, look: Callable[[], bool]) -> Steps[None]:
        """Wait until all ranks have a layer; look: whether this one has. Raises LostChunkError."""
        laid = self.watch.laid
        while True:
            is_there = look()
            sound = [not isinstance(part, StoreError) for part in self._parts or ()]
            sound += [True] * (len(self._used) - len(sound))
            if not self._all_read:
                here = [is_there, self.source.is_all_read(), *sound]
                is_there, self._all_read, *sound = on_all_ranks(self.stack, here)
            if is_there or not all(sound):
                break
            if self._parts is not None:
                time.sleep(WAIT_SECONDS)  # for a buffer
            if not self._all_read:
                yield  # as often on all ranks
        self.watch.waited(wait.began, wait.seconds(without=self.watch.laid - laid))
        if not all(sound):
            self._lose(self._parts or [], sound)

    def _laying(self) -> Laying | None:
        """Return how all layers are laid, if a kernel can read all chunks where they are."""
        if self._buffers is None or self._is_planned:
            return self._planned
        self._is_planned = True
        with self.watch.laying():
            kvs = self.source.in_memory() if Laying.is_possible(self._buffers) else None
            if kvs is not None:
                parts = [
                    WholePart(kv, LayerPart(chunk.start, chunk.part(kv.layer(0)), chunk.turn))
                    for chunk, kv in zip(self._used, kvs, strict=True)
                ]
                self._planned = Laying.of(self._buffers, self.fused, parts)
        return self._planned

    def _lay(self, laying: Laying, layer: int) -> Steps[None]:
        """Make the compute stream wait for one layer of all chunks, and queue the next one.

        Unless that is laid already: rows may have been computed there.
        """
        self._queue(laying, layer)
        wait = LayerWait((tier, None) for tier in self._tiers)
        yield from self._until_there(wait, lambda: True)  # other ranks may still read theirs
        self._arrive()
        if layer + 1 < self.stack.geometry.layers and layer + 1 not in self._laid:
            self._queue(laying, layer + 1)

    def _queue(self, laying: Laying, layer: int) -> None:
        if self._queued is None or self._queued[0] != layer:
            with self.watch.laying():
                self._arrive()
                self._queued = layer, laying.queue(layer)

    def _is_sent(
        self, layer: int, used: Sequence[LoadedChunk], parts: Sequence[LayerKV | StoreError]
    ) -> bool:
        """Whether a layer is ready on the host, or its copy to the device is queued."""
        sound = [part for part in parts if not isinstance(part, StoreError)]
        if self._buffers is None or len(sound) < len(parts):
            return True
        with self.watch.laying():
            if self._upload is None:
                free = self._free or self._buffers.copy_stream.worked()
                placed = _placed(layer, used, sound)
                self._upload = Upload(self._buffers, self.fused, layer, placed, free)
            return self._upload.go_on()

    def _arrive(self) -> None:
        """Make the compute stream wait for the queued copies."""
        if self._upload is not None:
            self._upload.arrive()
        if self._queued is not None and self._buffers is not None:
            self._buffers.copy_stream.hold_work(self._queued[1])
        self._upload = self._queued = None

    def _look_ahead(self, buffers: PinnedBuffers, layer: int, used: Sequence[LoadedChunk]) -> None:
        """Begin to copy a layer in the background, if it was read; its slot is free by now."""
        self._free = buffers.copy_stream.worked()
        if layer < self.stack.geometry.layers and self.source.is_read(layer):
            self._parts = self.source.layer(layer)
            self._is_sent(layer, used, self._parts)

    def _lose(self, parts: Sequence[LayerKV | StoreError], sound: Sequence[bool]) -> None:
        for chunk, part in zip(self._used, parts, strict=False):
            if isinstance(part, StoreError):
                chunk.reason = miss_of(part)
        pairs = zip(self._used, sound, strict=True)
        self._use_without([chunk for chunk, is_sound in pairs if not is_sound])
        self.rewind()
        raise LostChunkError

    def rewind(self) -> None:
        """Start again with the first layer, overwriting the buffer."""
        self._laid.clear()
        self._arrive()  # late rows would fall on those of the next pass
        if self._planned is not None:
            self._planned.restart()
        self._parts = self._free = None
        self._all_read = False
        self.source.rewind()


def _placed(layer: int, used: Sequence[LoadedChunk], parts: Sequence[LayerKV]) -> list[LayerPart]:
    """Return chunks' parts of a layer with their destinations."""
    return [
        LayerPart(
            chunk.start,
            chunk.part(part),
            None if chunk.turn is None else chunk.turn.of(layer),
        )
        for chunk, part in zip(used, parts, strict=True)
    ]
