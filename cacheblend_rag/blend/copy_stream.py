"""A device's copy stream, and the page-locked buffers through which KV is copied.

Copies run on a stream of their own while the compute stream works. Events order what one stream
writes and the other reads: the device waits for them, the host never does.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

BUFFERS = 16
BUFFER_BYTES = 4 << 20
PINNED_BYTES = BUFFERS * BUFFER_BYTES
"""Most page-locked memory of all passes on a device."""
COPY_STREAM_BYTES = PINNED_BYTES + 7 * BUFFER_BYTES
"""Most memory of the device: as much again, and what a buffer's unpacked, turned KV takes."""
ALIGNMENT = 8
"""Of the first tensor of a part; no number has more bytes."""

_LOG = logging.getLogger(__name__)


class Event(Protocol):
    """A point in what a stream was asked to do."""

    def query(self) -> bool:
        """Whether the device is past it."""

    def synchronize(self) -> None:
        """Have this thread wait until it is; not for the thread that drives the model."""


class CopyStream(Protocol):
    """What of a device a transfer asks for. Its work's stream is the calling thread's own."""

    def pinned(self, nbytes: int) -> Tensor:
        """Return page-locked memory, (nbytes,) uint8."""

    def scratch(self, nbytes: int) -> Tensor:
        """Return memory of the device that belongs to the copy stream, (nbytes,) uint8."""

    def has(self, tensor: Tensor) -> bool:
        """Whether it lies on the device."""

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether it lies in page-locked memory, so that it can be copied from there."""

    def worked(self) -> Event:
        """Return the event behind all that the work's stream was asked so far."""

    def carried(self) -> Event:
        """Return the event behind all that the copy stream was asked so far."""

    def follow(self, event: Event) -> None:
        """Have the copy stream wait for an event."""

    def hold_work(self, event: Event) -> None:
        """Have the work's stream wait for an event."""

    def copy(self, into: Tensor, tensor: Tensor) -> None:
        """Copy on the copy stream; who asks keeps both until an event behind it."""

    def run(self, work: Callable[[], object]) -> None:
        """Do on the copy stream what asks the device for something."""

    def share(self, *tensors: Tensor) -> None:
        """Keep tensors from being reused until the copy stream is through its queue."""


class CudaCopyStream:
    """The copy_stream of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # torch does not type what makes streams and events.
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def pinned(self, nbytes: int) -> Tensor:
        """Return page-locked memory; ordinary where there is none: slower, and as right."""
        try:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            _LOG.warning("no page-locked memory, so chunk KV is copied slowly: %s", error)
            return torch.empty(nbytes, dtype=torch.uint8)

    def scratch(self, nbytes: int) -> Tensor:
        with torch.cuda.stream(self._stream):
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def has(self, tensor: Tensor) -> bool:
        return tensor.is_cuda

    def is_pinned(self, tensor: Tensor) -> bool:
        return tensor.is_pinned()

    def worked(self) -> Event:
        return _event(torch.cuda.current_stream(self._device))

    def carried(self) -> Event:
        return _event(self._stream)

    def follow(self, event: Any) -> None:
        self._stream.wait_event(event)

    def hold_work(self, event: Any) -> None:
        torch.cuda.current_stream(self._device).wait_event(event)

    def copy(self, into: Tensor, tensor: Tensor) -> None:
        with torch.cuda.stream(self._stream):
            into.copy_(tensor, non_blocking=True)

    def run(self, work: Callable[[], object]) -> None:
        with torch.cuda.stream(self._stream):
            work()

    def share(self, *tensors: Tensor) -> None:
        for tensor in tensors:
            if tensor.is_cuda:
                tensor.record_stream(self._stream)


def _event(stream: torch.cuda.Stream) -> torch.cuda.Event:
    # A thread that waits for it sleeps.
    event: torch.cuda.Event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record(stream)
    return event


@dataclass
class PinnedBuffer:
    """Memory that a copy passes through: host and device, (bytes,) uint8 each. used: bytes of it.

    until: the event after which it can be used anew. held: what must be there until then.
    """

    host: Tensor
    device: Tensor
    used: int = 0
    until: Event | None = None
    held: Sequence[Tensor] = ()

    def rows(self, row_bytes: int) -> int:
        """Return how many rows of so many bytes still fit."""
        return (self.host.numel() - _aligned(self.used, ALIGNMENT)) // row_bytes

    def place(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return room on the host and on the device, contiguous, for such a tensor."""
        start = _aligned(self.used, like.itemsize)
        here = slice(start, start + like.nbytes)
        self.used = here.stop
        host, device = (
            part[here].view(like.dtype).view(like.shape) for part in (self.host, self.device)
        )
        return host, device


def _aligned(nbytes: int, to: int) -> int:
    return -(-nbytes // to) * to


class PinnedBuffers:
    """The buffers of a device, for all passes: made when first needed, used over and over.

    writer: the thread that waits for what comes from the device.
    """

    def __init__(
        self, copy_stream: CopyStream, most: int = BUFFERS, nbytes: int = BUFFER_BYTES
    ) -> None:
        self.copy_stream, self.writer = (
            copy_stream,
            ThreadPoolExecutor(1, thread_name_prefix="kv-cut"),
        )
        self._left, self._nbytes = most, nbytes
        self._lock = threading.Lock()
        self._free: list[PinnedBuffer] = []
        self._busy: list[PinnedBuffer] = []

    def take(self) -> PinnedBuffer | None:
        """Return an empty buffer; None while the device needs them all."""
        with self._lock:
            self._collect()
            if not self._free and self._left:
                pinned, scratch = (
                    self.copy_stream.pinned(self._nbytes),
                    self.copy_stream.scratch(self._nbytes),
                )
                self._left -= 1  # not before: there may be no memory for it
                return PinnedBuffer(pinned, scratch)
            return self._free.pop() if self._free else None

    def give(
        self, buffer: PinnedBuffer, until: Event | None = None, held: Sequence[Tensor] = ()
    ) -> None:
        """Give a buffer back; it and ``held`` are kept until the device is past an event."""
        buffer.until, buffer.held = until, held
        with self._lock:
            self._busy.append(buffer)
            self._collect()

    def release(self) -> int:
        """Let go of the buffers that are not in use; returns their bytes, on the host and there."""
        with self._lock:
            self._collect()
            count = len(self._free)
            self._free.clear()
            self._left += count
        return 2 * count * self._nbytes

    def _collect(self) -> None:
        busy, self._busy = self._busy, []
        for buffer in busy:
            if buffer.until is not None and not buffer.until.query():
                self._busy.append(buffer)
                continue
            buffer.used, buffer.until, buffer.held = 0, None, ()
            self._free.append(buffer)


def release_pinned(device: torch.device) -> int:
    """Let go of a device's buffers that are not in use, if it has any; returns their bytes."""
    buffers = pinned_buffers_of(device)
    return 0 if buffers is None else buffers.release()


def has_copy_stream(device: torch.device) -> bool:
    """Whether what a device is sent is copied, and unpacked, beside its work."""
    return device.type == "cuda"


def pinned_buffers_of(device: torch.device) -> PinnedBuffers | None:
    """Return a device's buffers; None where copies are plain ones, as between a CPU and itself."""
    if not has_copy_stream(device):
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    return _cuda_pinned_buffers(index)


@cache
def _cuda_pinned_buffers(index: int) -> PinnedBuffers:
    return PinnedBuffers(CudaCopyStream(torch.device("cuda", index)))
