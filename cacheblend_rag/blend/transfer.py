"""Copies KV to a device, or from it, while the device computes.

Neither direction makes the host wait: without a free buffer, ``go_on`` returns False and is called
again later.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from cacheblend_rag.blend.copy_stream import Event, PinnedBuffer, PinnedBuffers, pinned_buffers_of
from cacheblend_rag.blend.fused import FusedKV
from cacheblend_rag.blend.rotary import Rotation
from cacheblend_rag.blend.stack import DecoderStack, on_all_ranks
from cacheblend_rag.blend.steps import Steps

PAUSE_SECONDS = 0.001
"""How long a step sleeps when no buffer is free, before other work may run."""


class Sendable(Protocol):
    """One layer of a chunk in a form that can be copied to a device.

    tokens: of the chunk. row_bytes: most bytes per token, packed or unpacked. tensors: the tensors
    to copy.
    """

    @property
    def tokens(self) -> int: ...

    @property
    def row_bytes(self) -> int: ...

    @property
    def tensors(self) -> Sequence[Tensor]: ...

    def cut(self, start: int, end: int) -> Sendable:
        """Return some of its tokens."""

    @property
    def arrived(self) -> Callable[[Sequence[Tensor]], tuple[Tensor, Tensor]]:
        """Return a function that makes keys and values of the copied tensors.

        Keys and values are (kv_heads, tokens, head_dim). The function keeps no reference to them.
        """


@dataclass(frozen=True, slots=True)
class Numbers:
    """A Sendable of plain keys and values, each (kv_heads, tokens, head_dim)."""

    keys: Tensor
    values: Tensor

    @property
    def tokens(self) -> int:
        return int(self.keys.shape[1])

    @property
    def row_bytes(self) -> int:
        return 2 * self.keys.nbytes // self.tokens

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        return self.keys, self.values

    def cut(self, start: int, end: int) -> Numbers:
        return Numbers(self.keys[:, start:end], self.values[:, start:end])

    @property
    def arrived(self) -> Callable[[Sequence[Tensor]], tuple[Tensor, Tensor]]:
        return lambda tensors: (tensors[0], tensors[1])


@dataclass(frozen=True, slots=True)
class LayerPart:
    """One layer of a chunk, and its destination; start, turn: see ``FusedKV.place``."""

    start: int
    kv: Sendable
    turn: Rotation | None

    def cut(self, tokens: int) -> tuple[LayerPart, LayerPart | None]:
        """Return its first tokens, and the rest."""
        if tokens >= self.kv.tokens:
            return self, None
        first = replace(self, kv=self.kv.cut(0, tokens))
        rest = self.kv.cut(tokens, self.kv.tokens)
        return first, replace(self, start=self.start + tokens, kv=rest)


class Upload:
    """The copy of one layer of a prompt's chunks into the buffer of a pass.

    after: an event after the work that last used the layer's slot in the buffer.
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
        self._event: Event | None = None
        self._copy_stream.follow(after)
        self._copy_stream.share(fused.keys, fused.values)

    def go_on(self) -> bool:
        """Queue copies while buffers are free; returns whether all copies are queued."""
        while self._todo:
            buffer = self._buffers.take()
            if buffer is None:
                return False
            held: list[Tensor] = []
            try:
                self._fill(buffer, held)
            finally:  # also if it fails for lack of memory
                self._event = self._copy_stream.carried()
                self._buffers.give(buffer, self._event, held)
        return True

    def arrive(self) -> None:
        """Make the compute stream wait for the copies."""
        if self._event is not None:
            self._copy_stream.hold_work(self._event)

    def _fill(self, buffer: PinnedBuffer, held: list[Tensor]) -> None:
        """Queue copies of as many tokens as fit in a buffer; ``held`` gets tensors to keep."""
        while self._todo and (rows := buffer.rows(self._todo[0].kv.row_bytes)):
            part, rest = self._todo.popleft().cut(rows)
            if rest is not None:
                self._todo.appendleft(rest)
            sent = [self._sent(tensor, buffer, held) for tensor in part.kv.tensors]
            if part.turn is not None:
                self._copy_stream.share(part.turn.cos, part.turn.sin)
            self._copy_stream.run(partial(self._lay, part.start, part.kv.arrived, sent, part.turn))

    def _lay(
        self,
        start: int,
        arrived: Callable[[Sequence[Tensor]], tuple[Tensor, Tensor]],
        sent: Sequence[Tensor],
        turn: Rotation | None,
    ) -> None:
        self._fused.place(self._layer, start, *arrived(sent), turn)

    def _sent(self, tensor: Tensor, buffer: PinnedBuffer, held: list[Tensor]) -> Tensor:
        """Queue the copy of a tensor to the device; returns the device tensor."""
        if self._copy_stream.has(tensor):
            self._copy_stream.share(tensor)
            return tensor
        host, device = buffer.place(tensor)
        if tensor.is_contiguous() and self._copy_stream.is_pinned(tensor):
            held.append(tensor)
        else:
            tensor = host.copy_(tensor)
        self._copy_stream.copy(device, tensor)
        return device


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
