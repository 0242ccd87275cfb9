"""Copies chunk KV from memory into a pass's KV buffer: planned once, one kernel launch a layer.

A kernel reads the chunks where they are. What it is to be told of them is worked out for all layers
before the first one, so the host's work for a layer does not depend on the number of chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Self

import torch
from torch import Tensor

from cacheblend_rag.blend.copy_stream import Event, PinnedBuffers
from cacheblend_rag.blend.fused import FusedKV
from cacheblend_rag.blend.layer_part import WholePart
from cacheblend_rag.kv.packed_kv import PackedKV, StoredKV


class Laying:
    """Copies the chunk KV of one pass into its KV buffer, layer by layer.

    buffers: of the device; they keep the chunks' memory until the device has read it. fused: the
    buffer of the pass. parts: chunks that the kernel can read, at least one.
    """

    def __init__(
        self, buffers: PinnedBuffers, fused: FusedKV, parts: Sequence[WholePart], *, on_host: bool
    ) -> None:
        from cacheblend_rag.blend.kernels.layer_launches import LayerLaunches, tables_of

        self._buffers, self._stream, self._fused = buffers, buffers.copy_stream, fused
        numbers, launches = tables_of(parts)
        places = self._stream.pinned(numbers.nbytes), self._stream.scratch(numbers.nbytes)
        host, table = (place.view(torch.int64).view(numbers.shape) for place in places)
        host.copy_(torch.from_numpy(numbers))
        turns = {id(part.first.turn): part.first.turn for part in parts}
        moves = [tensor for turn in turns.values() if turn for tensor in (turn.cos, turn.sin)]
        chunks = [tensor for part in parts for tensor in _tensors(part.kv)]
        there = [tensor for tensor in chunks if self._stream.has(tensor)]
        self._stream.share(fused.keys, fused.values, *moves, *there)
        self._place = LayerLaunches(fused, table, launches, on_host=on_host)
        self._held: Sequence[Tensor] = (*chunks, *moves, host, table)
        self._waits = True
        self._stream.copy(table, host)
        self._buffers.hold(self._held, self._stream.carried())

    @staticmethod
    def is_possible(buffers: PinnedBuffers) -> bool:
        """Return whether a kernel places chunks on a device at all."""
        return bool(buffers.table_bytes)

    @classmethod
    def of(cls, buffers: PinnedBuffers, fused: FusedKV, parts: Sequence[WholePart]) -> Self | None:
        """Return the plan for a pass; None unless a kernel can read all chunks where they are."""
        from cacheblend_rag.blend.kernels.placement import is_readable

        stream, on_host = buffers.copy_stream, False
        for part in parts:
            if not is_readable(part.first):
                return None
            for tensor in _tensors(part.kv):
                is_there = stream.has(tensor)
                if not is_there and not stream.is_pinned(tensor):
                    return None
                on_host = on_host or not is_there
        return cls(buffers, fused, parts, on_host=on_host)

    def queue(self, layer: int) -> Event:
        """Launch the kernel that copies one layer of all chunks; returns an event after it.

        In a ring it begins once all work that is queued by now is done, which may use the layer's
        place. In a buffer of all layers only the first one does: then layers follow one another.
        """
        if self._waits:
            self._stream.follow(self._stream.worked())
            self._waits = not self._fused.keeps_layers
        try:
            self._stream.run(partial(self._place, layer))
        finally:
            event = self._stream.carried()
            self._buffers.hold(self._held, event)
        return event

    def restart(self) -> None:
        """Have the next layer wait for the work that is queued by then, whatever the buffer."""
        self._waits = True


def _tensors(kv: StoredKV) -> tuple[Tensor, Tensor]:
    return (kv.codes, kv.exponents) if isinstance(kv, PackedKV) else (kv.keys, kv.values)
