"""Loads stored chunks into a blend pass, each layer just before it is needed."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np
from torch import Tensor

from cacheblend_rag.blend.copy_stream import CopyStream, Event, has_copy_stream, pinned_buffers_of
from cacheblend_rag.blend.fused import FusedKV
from cacheblend_rag.blend.layer_part import LayerPart, WholePart
from cacheblend_rag.blend.placement import place_parts
from cacheblend_rag.blend.rotary import Rotation
from cacheblend_rag.blend.rows import Mask
from cacheblend_rag.blend.stack import DecoderStack, on_all_ranks
from cacheblend_rag.blend.steps import Steps
from cacheblend_rag.blend.transfer import Laying, Upload
from cacheblend_rag.errors import StoreError
from cacheblend_rag.kv.chunk_kv import ChunkKV
from cacheblend_rag.kv.fetch import LayerSource
from cacheblend_rag.kv.reader import ChunkReader
from cacheblend_rag.kv.shared_chunk import Found
from cacheblend_rag.kv.store import TieredKVStore
from cacheblend_rag.kv.stored_chunk import miss_of
from cacheblend_rag.kv.timings import LayerWait
from cacheblend_rag.prefill.lead_in import PlacedChunk
from cacheblend_rag.prefill.policy import StoredPart, free_tokens
from cacheblend_rag.prefill.stopwatch import Stopwatch
from cacheblend_rag.reason import Miss, Reason
from cacheblend_rag.report import ChunkReport

WAIT_SECONDS = 0.001
"""How long a step waits for a layer before other work may run."""


def begin_reading(
    store: TieredKVStore,
    placed: Sequence[PlacedChunk],
    stack: DecoderStack,
    *,
    promote: bool = True,
) -> LayerSource:
    """Begin to read chunks for a pass; they stay packed if its device unpacks them.

    promote: see ``TieredKVStore.fetch``.
    """
    keys = [chunk.key for chunk in placed]
    unpack = not has_copy_stream(stack.geometry.device)
    return store.fetch(keys, promote=promote, unpack=unpack)


class LostChunkError(Exception):
    """A chunk turned out to be unreadable: the pass must start again without it."""


@dataclass
class LoadedChunk:
    """A chunk that is copied to its place in a prompt.

    tier, reason: where it was found, or why it is a miss on this rank. is_used: whether all ranks
    have it. turn: rotates its keys from their stored positions, None if that is no move. prior:
    (tokens,) of its tokens in the prompt, None unless all ranks have it.
    """

    placed: PlacedChunk
    head: ChunkReader | None = None
    tier: str | None = None
    reason: Reason | None = None
    is_used: bool = False
    turn: Rotation | None = None
    prior: Tensor | None = None

    @property
    def here(self) -> slice:
        """The positions of its tokens in the prompt."""
        return slice(self.placed.start, self.placed.end)

    @property
    def own(self) -> slice:
        """The indices of these tokens in the stored chunk."""
        skipped = self.placed.before
        return slice(skipped, skipped + self.placed.tokens)

    def part(self, kv: ChunkKV) -> ChunkKV:
        """Return these tokens' part of one layer of the stored chunk, not copied."""
        is_whole = kv.tokens == self.placed.tokens
        return kv if is_whole else kv.cut(self.own.start, self.own.stop)

    def layer_part(self, layer: int, kv: ChunkKV) -> LayerPart:
        """Return the same with its destination."""
        turn = None if self.turn is None else self.turn.of(layer)
        return LayerPart(self.placed.start, self.part(kv), turn)

    def free(self, share: float) -> Mask:
        """Return (tokens,) bool: which tokens may be recomputed; share: see ``free_tokens``."""
        if self.placed.is_exact:
            return np.zeros(self.placed.tokens, dtype=np.bool_)
        return free_tokens(self.placed.tokens, self.prior, share if self.placed.protected else 0)

    def stored_part(self, share: float) -> StoredPart:
        """Return it as the controller sees it; a chunk in memory needs no reading."""
        nbytes = 0 if self.head is None else self.head.layers * self.head.layer_bytes
        protected = self.placed.tokens - int(self.free(share).sum())
        is_chunk, tier = not self.placed.is_block, self.tier or ""
        return StoredPart(
            self.placed.start, self.placed.end, tier, nbytes, protected, is_chunk=is_chunk
        )

    def report(self) -> ChunkReport:
        """Return its report; a chunk that only other ranks lack is not stored."""
        if self.is_used or self.reason:
            return self.placed.report(self.reason, self.tier)
        return self.placed.report(Miss.NOT_STORED)


class ChunkLoader:
    """Copies chunks into the buffer of a pass, the same on all ranks.

    chunks: in the order of ``source``. fused: the buffer, set by ``into``; finding chunks needs
    none. watch: gets the times of waiting for layers, and of copying them.

    On a GPU a layer is copied on the copy stream, and the compute stream waits for it; while a
    layer is computed, the next one is copied if it has been read.

    Ranks agree on each layer until all of them have read every layer: no chunk can be lost then,
    and each waits for its own copies only.
    """

    fused: FusedKV

    def __init__(
        self,
        stack: DecoderStack,
        placed: Iterable[PlacedChunk],
        source: LayerSource,
        watch: Stopwatch | None = None,
    ) -> None:
        self.stack, self.source = stack, source
        self.chunks = [LoadedChunk(chunk) for chunk in placed]
        self.watch = watch or Stopwatch(stack.geometry.device)
        self._buffers = pinned_buffers_of(stack.geometry.device)
        self._laying: Laying | None = None
        self._transfer: _Transfer | None = None
        self._errors: list[StoreError | None] = []  # of the used chunks, if one cannot be read
        self._free: Event | None = None
        self._loaded = 0
        self._all_read = False

    @property
    def used(self) -> list[LoadedChunk]:
        """The chunks that are copied."""
        return [chunk for chunk in self.chunks if chunk.is_used]

    def find(self) -> Steps[None]:
        """Find out which chunks all ranks have; yields after each, and while waiting."""
        for chunk in self.chunks:
            self._take(chunk, self.source.take())
            yield
        sound = [chunk.reason is None for chunk in self.chunks]
        ranked = [chunk.prior is not None for chunk in self.chunks]
        here = [self.source.is_all_read(), *sound, *ranked]
        self._all_read, *told = on_all_ranks(self.stack, here)
        count = len(self.chunks)
        for chunk, is_ranked in zip(self.chunks, told[count:], strict=True):
            chunk.prior = chunk.prior if is_ranked else None
        self._use(told[:count])

    def _take(self, chunk: LoadedChunk, found: Found) -> None:
        head, placed = found.head, chunk.placed
        chunk.tier, chunk.reason = found.tier, found.reason
        if head is None:
            return
        if self.stack.geometry.fits(head.shape, head.dtype, placed.stored_tokens):
            with suppress(IndexError):  # the stored position may be outside the model's range
                chunk.turn = self._turn(chunk, head)
                chunk.head = head
        if chunk.head is None:
            chunk.tier, chunk.reason = None, Miss.DAMAGED
            return
        chunk.prior = None if head.prior is None else head.prior[chunk.own]

    def _turn(self, chunk: LoadedChunk, head: ChunkReader) -> Rotation | None:
        """Return the rotation from the stored positions to those in the prompt; None if it is none.

        Raises IndexError if the offset is outside the model's range.
        """
        if head.precision == "int4":  # all keys are stored rotated for position 0
            return self.stack.rotation(1).per_token(chunk.placed.start)
        moved = chunk.placed.start - chunk.own.start - head.position
        return self.stack.rotation(moved) if moved else None

    def _use(self, used: Sequence[bool]) -> None:
        """Use some of the chunks, the same on all ranks."""
        for chunk, is_used in zip(self.chunks, used, strict=True):
            chunk.is_used = is_used
        self.source.keep(used)

    def leave_out(self, unwanted: Iterable[LoadedChunk], reason: Reason | None = None) -> None:
        """Use some chunks no more, the same on all ranks."""
        for chunk in unwanted:
            chunk.is_used, chunk.reason = False, reason or chunk.reason
        self._use([chunk.is_used for chunk in self.chunks])

    def into(self, fused: FusedKV) -> Self:
        """Copy chunks that were found into this buffer; returns this object."""
        self.fused = fused
        self._plan()
        return self

    def _plan(self) -> None:
        """Plan how all layers are copied, if a kernel can read all chunks where they are."""
        self._laying, used = None, self.used
        if self._buffers is None or not used or not Laying.is_possible(self._buffers):
            return
        if (kvs := self.source.in_memory()) is None:
            return
        with self.watch.laying():
            parts = [
                WholePart(kv, LayerPart(chunk.placed.start, chunk.part(kv.layer(0)), chunk.turn))
                for chunk, kv in zip(used, kvs, strict=True)
            ]
            self._laying = Laying.of(self._buffers, self.fused, parts)

    def load(self, layer: int) -> Steps[None]:
        """Copy one layer of all chunks into the buffer, once; yields while it waits for it.

        Layers are loaded in their order. Raises LostChunkError, on all ranks, when a chunk cannot
        be read any more.
        """
        if layer < self._loaded or not (used := self.used):
            return
        wait, laid = self._wait(layer, used), self.watch.laid
        while True:
            is_there = self._is_on_its_way(layer)
            sound = [error is None for error in self._errors] or [True] * len(used)
            if not self._all_read:
                here = [is_there, self.source.is_all_read(), *sound]
                is_there, self._all_read, *sound = on_all_ranks(self.stack, here)
            if is_there or not all(sound):
                break
            if not self._all_read:
                yield  # as often on all ranks
        self.watch.waited(wait.began, wait.seconds(without=self.watch.laid - laid))
        if not all(sound):
            self._lose(used, sound)
        self._arrive()
        self._loaded = layer + 1
        self._look_ahead(layer + 1)

    @property
    def _needs_reads(self) -> bool:
        """Whether the next layer is neither in memory nor taken from ``source`` already."""
        return self._transfer is None and self._laying is None and not self._errors

    def _wait(self, layer: int, used: Sequence[LoadedChunk]) -> LayerWait:
        """Have a layer read; returns the measurement of the wait."""
        if self._needs_reads:
            return self.source.waiting(layer)
        return LayerWait((chunk.tier or "", None) for chunk in used)

    def _is_on_its_way(self, layer: int) -> bool:
        """Whether this rank waits no more: a layer's copy is queued, or a chunk of it is lost."""
        if self._needs_reads and not self.source.wait(WAIT_SECONDS):
            return False
        if self._copy(layer):
            return True
        time.sleep(WAIT_SECONDS)  # for a buffer
        return False

    def _copy(self, layer: int) -> bool:
        """Copy more of a layer that has been read; see ``_is_on_its_way``."""
        with self.watch.laying():
            if self._transfer is None and not self._errors:
                self._begin(layer)
            return self._transfer is None or self._transfer.go_on()

    def _begin(self, layer: int) -> None:
        """Begin to copy a layer that has been read; chunks that are lost are noted instead."""
        if self._buffers is not None and self._laying is not None:
            self._transfer = _Queued(self._buffers.copy_stream, self._laying.queue(layer))
            return
        found = self.source.layer(layer)
        parts = [part for part in found if not isinstance(part, StoreError)]
        if len(parts) < len(found):
            self._errors = [one if isinstance(one, StoreError) else None for one in found]
        else:
            self._transfer = self._transfer_of(layer, parts)

    def _transfer_of(self, layer: int, kvs: Sequence[ChunkKV]) -> _Transfer:
        parts = [chunk.layer_part(layer, kv) for chunk, kv in zip(self.used, kvs, strict=True)]
        if self._buffers is None:
            return _Plain(self.fused, layer, parts)
        free = self._free or self._buffers.copy_stream.worked()
        return Upload(self._buffers, self.fused, layer, parts, free)

    def _arrive(self) -> None:
        """Have what is on its way be in the buffer for later work."""
        if self._transfer is not None:
            with self.watch.laying():
                self._transfer.arrive()
        self._transfer, self._errors = None, []

    def _look_ahead(self, layer: int) -> None:
        """Begin to copy a layer in the background, if it was read; its slot is free by now."""
        if self._buffers is None or layer == self.stack.geometry.layers:
            return
        if self._laying is None:
            self._free = self._buffers.copy_stream.worked()
            if not self.source.is_read(layer):
                return
        self._copy(layer)

    def _lose(self, used: Sequence[LoadedChunk], sound: Sequence[bool]) -> None:
        for chunk, error in zip(used, self._errors, strict=False):
            chunk.reason = chunk.reason if error is None else miss_of(error)
        self.leave_out([chunk for chunk, is_sound in zip(used, sound, strict=True) if not is_sound])
        self.rewind()
        self._plan()
        raise LostChunkError

    def rewind(self) -> None:
        """Start again with the first layer, overwriting the buffer."""
        self._arrive()  # late rows would fall on those of the next pass
        if self._laying is not None:
            self._laying.restart()
        self._loaded, self._free, self._all_read = 0, None, False
        self.source.rewind()


class _Transfer(Protocol):
    """The copy of one layer of all chunks into the buffer of a pass."""

    def go_on(self) -> bool:
        """Copy more of it; returns whether the rest needs no help of the host."""

    def arrive(self) -> None:
        """Have the layer be in the buffer for all work that follows."""


@dataclass(frozen=True)
class _Plain:
    """The copy by the host itself."""

    fused: FusedKV
    layer: int
    parts: Sequence[LayerPart]

    def go_on(self) -> bool:
        return True

    def arrive(self) -> None:
        place_parts(self.fused, self.layer, self.parts)


@dataclass(frozen=True)
class _Queued:
    """The copy by a kernel that reads all chunks where they are; event: comes after it."""

    stream: CopyStream
    event: Event

    def go_on(self) -> bool:
        return True

    def arrive(self) -> None:
        self.stream.hold_work(self.event)
