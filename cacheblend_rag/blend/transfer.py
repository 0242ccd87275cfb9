"""Copies KV to a device, or from it, while the device computes.

Neither direction makes the host wait: without a free buffer, ``go_on`` returns False and is called
again later.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Self

import torch
from torch import Tensor

from cacheblend_rag.blend.copy_stream import Event, PinnedBuffer, PinnedBuffers, pinned_buffers_of
from cacheblend_rag.blend.fused import FusedKV
from cacheblend_rag.blend.layer_part import LayerPart, WholePart
from cacheblend_rag.blend.placement import place_parts
from cacheblend_rag.blend.stack import DecoderStack, on_all_ranks
from cacheblend_rag.blend.steps import Steps
from cacheblend_rag.kv.chunk_kv import ChunkKV

MOST_PARTS = 500
"""Most chunks that go through a buffer together: so many rows fit in its table."""
PAUSE_SECONDS = 0.001
"""How long a step sleeps when no buffer is free, before other work may run."""


class Upload:
    """The copy of one layer of a prompt's chunks into the buffer of a pass.

    after: an event after the work that last used the layer's slot in the buffer.

    KV in ordinary memory is copied into page-locked buffers by a thread, which queues their copies,
    too. The kernel that places chunks reads page-locked memory where it is.
    """

    def __init__(
        self,
        buffers: PinnedBuffers,
        fused: FusedKV,
        layer: int,
        parts: Iterable[LayerPart],
        after: Event,
    ) -> None:
        self._buffers, self._copy_stream = buffers, buffers.copy_stream
        self._fused, self._layer = fused, layer
        self._todo = deque(parts)
        supported = all(part.kernel_supports for part in self._todo)
        self._has_kernel = bool(buffers.table_bytes) and supported
        self._staging: deque[Future[None]] = deque()
        self._events: list[Event] = []
        self._copy_stream.follow(after)
        self._copy_stream.share(fused.keys, fused.values)

    def go_on(self) -> bool:
        """Queue copies while buffers are free; returns whether all copies are queued."""
        while self._todo:
            buffer = self._buffers.take()
            if buffer is None:
                break
            load = _Load(buffer)
            self._fill(load)
            if load.sources:
                self._staging.append(self._buffers.stager.submit(self._send, load))
            else:
                self._send(load)
        while self._staging and self._staging[0].done():
            self._staging.popleft().result()
        return not self._todo and not self._staging

    def arrive(self) -> None:
        """Make the compute stream wait for the copies, also if not all chunks are queued."""
        wait(self._staging)
        for event in self._events:
            self._copy_stream.hold_work(event)

    def _fill(self, load: _Load) -> None:
        """Choose the tokens that go through a buffer: as many as fit."""
        while self._todo and len(load.parts) < MOST_PARTS:
            part = self._todo[0]
            in_place = self._has_kernel and _has_readable_layout(part)
            if in_place and all(map(self._is_accessible, part.kv.tensors)):
                self._todo.popleft()
                load.parts.append(part)
                load.held += part.kv.tensors
                continue
            if not (rows := _rows_of(part.kv, load.buffer)):
                return
            part, rest = self._todo.popleft().cut(rows)
            if rest is not None:
                self._todo.appendleft(rest)
            sent = [self._sent(tensor, load, in_place=in_place) for tensor in part.kv.tensors]
            load.parts.append(replace(part, kv=part.kv.moved(sent)))

    def _is_accessible(self, tensor: Tensor) -> bool:
        """Whether a kernel can access a tensor: it is on the device or in page-locked memory."""
        return self._copy_stream.has(tensor) or self._copy_stream.is_pinned(tensor)

    def _sent(self, tensor: Tensor, load: _Load, *, in_place: bool) -> Tensor:
        """Return the tensor that the chunk is placed from, and plan the copies that fill it.

        in_place: whether a kernel may read page-locked memory, which is then not copied.
        """
        if self._copy_stream.has(tensor) or (in_place and self._copy_stream.is_pinned(tensor)):
            load.held.append(tensor)
            return tensor
        start = load.buffer.used
        host, device = load.buffer.place(tensor)
        if tensor.is_contiguous() and self._copy_stream.is_pinned(tensor):
            load.copies.append((device, tensor))
            load.held.append(tensor)
        else:
            load.sources.append((host, tensor))
            load.stage(start)
        return device

    @torch.inference_mode()
    def _send(self, load: _Load) -> None:
        """Fill a buffer, and queue its copies and the placement of its chunks."""
        stream, buffer = self._copy_stream, load.buffer
        try:
            if load.sources:
                hosts, tensors = zip(*load.sources, strict=True)
                torch._foreach_copy_(hosts, tensors)
            place = self._by_kernel(load) if self._has_kernel else self._plainly(load.parts)
            for run in load.staged:
                stream.copy(buffer.device[run], buffer.host[run])
            for device, tensor in load.copies:
                stream.copy(device, tensor)
            stream.share(*(tensor for tensor in load.held if stream.has(tensor)))
            for part in load.parts:
                if part.turn is not None:
                    stream.share(part.turn.cos, part.turn.sin)
            stream.run(place)
        finally:  # also if it fails for lack of memory
            event = stream.carried()
            self._events.append(event)
            self._buffers.give(buffer, event, load.held)

    def _plainly(self, parts: Sequence[LayerPart]) -> Callable[[], None]:
        return partial(place_parts, self._fused, self._layer, parts)

    def _by_kernel(self, load: _Load) -> Callable[[], None]:
        """Write the kernel's table into the buffer; returns the function that launches it."""
        from cacheblend_rag.blend.kernels import placement as kernel

        rows, launches = kernel.table_of(load.parts)
        numbers = torch.tensor(rows)
        start = load.buffer.used
        host, table = load.buffer.place(numbers)
        host.copy_(numbers)
        load.stage(start)
        tensors = [tensor for part in load.parts for tensor in part.kv.tensors]
        on_host = any(self._copy_stream.is_pinned(tensor) for tensor in tensors)

        def launch() -> None:
            programs = kernel.LINK_PROGRAMS if on_host else kernel.PROGRAMS
            into = self._fused.of_layer(self._layer)
            kernel.place_by_kernel(*into, table, launches, programs=programs)

        return launch


def _rows_of(kv: ChunkKV, buffer: PinnedBuffer) -> int:
    """Return how many of a chunk's tokens fit in a buffer, both quantized and dequantized."""
    numbers, *scales = kv.tensors
    packed = numbers[..., 0, :].nbytes
    beside = sum(tensor.nbytes for tensor in scales)
    return min(buffer.rows(kv.row_bytes), buffer.rows(packed, beside))


def _has_readable_layout(part: LayerPart) -> bool:
    """Whether the placement kernel supports the strides of a chunk's tensors."""
    from cacheblend_rag.blend.kernels.placement import is_readable  # Triton: only here

    return is_readable(part)


@dataclass
class _Load:
    """Chunks that go through a buffer together.

    parts: with their tensors on the device, or where a kernel reads them. sources: what is to be
    copied into the buffer first, each with its place there. staged: the runs of the buffer's bytes
    to copy. copies: what is copied past the buffer. held: what is to be kept until all is done.
    """

    buffer: PinnedBuffer
    parts: list[LayerPart] = field(default_factory=list)
    sources: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    staged: list[slice] = field(default_factory=list)
    copies: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    held: list[Tensor] = field(default_factory=list)

    def stage(self, start: int) -> None:
        """Have the buffer's bytes from ``start`` to those used last copied."""
        joins = bool(self.staged) and self.staged[-1].stop == start
        begin = self.staged.pop().start if joins else start
        self.staged.append(slice(begin, self.buffer.used))


class Download:
    """The copy of tensors from a device into ordinary host memory.

    A separate thread waits for the device and copies them from the page-locked buffers.
    """

    def __init__(self, buffers: PinnedBuffers) -> None:
        self._buffers, self._copy_stream = buffers, buffers.copy_stream
        self._todo: deque[tuple[Tensor, Tensor]] = deque()
        self._coming: list[Future[None]] = []
        self._event: Event | None = None

    def add(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Copy device tensors, of any strides, each into a host tensor, (..., tokens, numbers).

        Work that is queued later may overwrite tensors that were added before these.
        """
        self.leave()
        self._copy_stream.follow(self._copy_stream.worked())
        for into, tensor in pairs:
            self._copy_stream.share(tensor)
            self._todo.append((into, tensor))
        self.go_on()

    def leave(self) -> None:
        """Make later work wait until the tensors were read, so that it may overwrite them."""
        if self._event is not None:
            self._copy_stream.hold_work(self._event)

    def go_on(self) -> bool:
        """Queue copies while buffers are free; returns whether all copies are queued."""
        while self._todo:
            buffer = self._buffers.take()
            if buffer is None:
                return False
            try:
                filled = self._fill(buffer)
            except BaseException:  # such as lack of memory
                self._buffers.give(buffer, self._copy_stream.carried())
                raise
            self._event = self._copy_stream.carried()
            write = partial(_write, self._buffers, buffer, self._event, filled)
            self._coming.append(self._buffers.writer.submit(write))
        return True

    def is_done(self) -> bool:
        """Return whether all tensors have arrived; queues more copies if buffers are free."""
        has_all = self.go_on()
        for done in [future for future in self._coming if future.done()]:
            done.result()
            self._coming.remove(done)
        return has_all and not self._coming

    def _fill(self, buffer: PinnedBuffer) -> list[tuple[Tensor, Tensor]]:
        """Queue copies of as much as fits in a buffer; returns (target, buffer) tensors."""
        filled = []
        while self._todo and (rows := buffer.rows(_row_bytes(self._todo[0][1]))):
            into, tensor = self._todo.popleft()
            if rows < tensor.shape[-2]:
                self._todo.appendleft((into[..., rows:, :], tensor[..., rows:, :]))
                into, tensor = into[..., :rows, :], tensor[..., :rows, :]
            host, device = buffer.place(tensor)
            self._copy_stream.run(partial(device.copy_, tensor))
            self._copy_stream.copy(host, device)
            filled.append((into, host))
        return filled


def _row_bytes(tensor: Tensor) -> int:
    return tensor.nbytes // tensor.shape[-2]


def _write(
    buffers: PinnedBuffers,
    buffer: PinnedBuffer,
    event: Event,
    filled: Sequence[tuple[Tensor, Tensor]],
) -> None:
    """Copy out of a buffer once the device has filled it; on the writer's thread."""
    try:
        event.synchronize()
        for into, host in filled:
            into.copy_(host)
    finally:
        buffers.give(buffer)


def until(stack: DecoderStack, is_done: Callable[[], bool]) -> Steps[None]:
    """Yield until a condition holds on all ranks."""
    while not all(on_all_ranks(stack, [is_done()])):
        time.sleep(PAUSE_SECONDS)
        yield


def to_host(stack: DecoderStack, tensor: Tensor) -> Steps[Tensor]:
    """Copy (tokens,) numbers from the model's device to the host, without blocking other work."""
    buffers = pinned_buffers_of(stack.geometry.device)
    if buffers is None:
        return tensor
    into, download = torch.empty(tensor.shape, dtype=tensor.dtype), Download(buffers)
    download.add([(into[:, None], tensor[:, None])])
    yield from until(stack, download.is_done)
    return into


class Laying:
    """Copies the chunk KV of one pass into its KV buffer, layer by layer.

    buffers: of the device; they keep the chunks' memory until the device has read it. fused: the
    buffer of the pass. parts: chunks that the kernel can read, at least one.
    """

    def __init__(
        self, buffers: PinnedBuffers, fused: FusedKV, parts: Sequence[WholePart], *, on_host: bool
    ) -> None:
        from cacheblend_rag.blend.kernels.placement import LayerLaunches, tables_of

        self._buffers, self._stream, self._fused = buffers, buffers.copy_stream, fused
        numbers, launches = tables_of(parts)
        places = self._stream.pinned(numbers.nbytes), self._stream.scratch(numbers.nbytes)
        host, table = (place.view(torch.int64).view(numbers.shape) for place in places)
        host.copy_(torch.from_numpy(numbers))
        turns = {id(part.first.turn): part.first.turn for part in parts}
        moves = [tensor for turn in turns.values() if turn for tensor in (turn.cos, turn.sin)]
        chunks = [tensor for part in parts for tensor in part.kv.tensors]
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
            for tensor in part.kv.tensors:
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
