"""Laying: stored chunks on their way into a pass, laid in layer by layer just before their use."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from cacheblend_rag.blend.fused import FusedKV
from cacheblend_rag.blend.rotary import Rotation
from cacheblend_rag.blend.stack import DecoderStack, on_all_ranks
from cacheblend_rag.blend.steps import Steps
from cacheblend_rag.errors import StoreError
from cacheblend_rag.kv.fetch import Found, LayerSource, miss_of
from cacheblend_rag.kv.reader import ChunkReader, LayerKV
from cacheblend_rag.report import MissReason

WAIT_SECONDS = 0.001
"""How long a step waits for a layer before others have their turn."""


class LostChunkError(Exception):
    """A chunk turned out unreadable on its way: the pass is to start anew, without it."""


@dataclass
class LaidChunk:
    """A chunk to be laid at positions [start, end).

    tier, reason: where it was found, why it is a miss on this rank, if so. is_used: whether all
    ranks have it. turn: what moves its keys, None where they were computed at these positions.
    """

    start: int
    end: int
    head: ChunkReader | None = None
    tier: str | None = None
    reason: MissReason | None = None
    is_used: bool = False
    turn: Rotation | None = None


class Laying:
    """Lays chunks into the buffer of a pass, all ranks alike.

    spans: where they stand, in the order in which ``source`` hands them out.
    """

    def __init__(
        self,
        stack: DecoderStack,
        fused: FusedKV,
        spans: Sequence[tuple[int, int]],
        source: LayerSource,
    ) -> None:
        self.stack, self.fused, self.source = stack, fused, source
        self.chunks = [LaidChunk(start, end) for start, end in spans]
        self._laid: set[int] = set()
        self._seconds = 0.0

    def heads(self) -> Steps[None]:
        """Find out which chunks all ranks have; yields after each, and waits for them."""
        for chunk in self.chunks:
            self._take(chunk, self.source.take())
            yield
        self._agree([chunk.reason is None for chunk in self.chunks])

    def _take(self, chunk: LaidChunk, found: Found) -> None:
        head = found.head
        chunk.tier, chunk.reason = found.tier, found.reason
        if head is None:
            return
        if not self.fused.fits(head.shape, head.dtype, chunk.end - chunk.start):
            chunk.tier, chunk.reason = None, "damaged"
            return
        chunk.head = head
        if chunk.start != head.position:
            chunk.turn = self.stack.rotation(chunk.start - head.position)

    def _agree(self, sound: Sequence[bool]) -> None:
        """Use the chunks that are sound on all ranks."""
        agreed = on_all_ranks(self.stack, sound)
        for chunk, is_used in zip(self.chunks, agreed, strict=True):
            chunk.is_used = is_used
        self.source.keep(agreed)

    def leave_out(self, unwanted: Sequence[LaidChunk]) -> None:
        """Leave out chunks that are computed sooner than loaded, the same on all ranks."""
        for chunk in unwanted:
            chunk.reason = "slow"
        self._agree_without(unwanted)

    def _agree_without(self, gone: Sequence[LaidChunk]) -> None:
        left = {id(chunk) for chunk in gone}
        self._agree([chunk.is_used and id(chunk) not in left for chunk in self.chunks])

    def lay(self, layer: int) -> Steps[None]:
        """Lay one layer of all chunks in, unless it is there; yields while it is waited for.

        Raises LostChunkError, on all ranks alike, when a chunk cannot be read any more.
        """
        used = [chunk for chunk in self.chunks if chunk.is_used]
        if layer in self._laid or not used:
            return
        parts = yield from self._layer(layer, used)
        for chunk, (keys, values) in zip(used, parts, strict=True):
            turn = None if chunk.turn is None else chunk.turn.of(layer)
            self.fused.lay(layer, chunk.start, keys, values, turn)
        self._laid.add(layer)

    def _layer(self, layer: int, used: Sequence[LaidChunk]) -> Steps[list[LayerKV]]:
        """Wait for one layer of all chunks, which all ranks then have."""
        started = time.perf_counter()
        self.source.want(layer)
        parts: list[LayerKV | StoreError] | None = None
        while True:
            if parts is None and self.source.wait(WAIT_SECONDS):
                parts = self.source.layer(layer)
            here = [parts is not None, *(not isinstance(p, StoreError) for p in parts or ())]
            here += [True] * (1 + len(used) - len(here))
            is_there, *sound = on_all_ranks(self.stack, here)
            if is_there or not all(sound):
                break
            yield
        self._seconds += time.perf_counter() - started
        if not all(sound):
            self._lose(used, parts or [], sound)
        return [part for part in parts or () if not isinstance(part, StoreError)]

    def _lose(
        self,
        used: Sequence[LaidChunk],
        parts: Sequence[LayerKV | StoreError],
        sound: Sequence[bool],
    ) -> None:
        for chunk, part in zip(used, parts, strict=False):
            if isinstance(part, StoreError):
                chunk.reason = miss_of(part)
        self._agree_without([c for c, is_sound in zip(used, sound, strict=True) if not is_sound])
        self.rewind()
        raise LostChunkError

    def rewind(self) -> None:
        """Lay the first layer in again next, over what the pass has made of the buffer."""
        self._laid.clear()
        self.source.rewind()

    def taken_seconds(self) -> float:
        """Return the seconds spent waiting for layers since this was last asked."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds
