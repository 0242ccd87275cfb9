"""A device's copy stream, and the page-locked buffers through which KV is copied.

Copies run on their own stream while the compute stream works. Events order writes of one stream
and reads of the other: the device waits for them, the host never does.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from cacheblend_rag.blend.placement import has_kernel
from cacheblend_rag.kv.read_memory import OF_PROCESS

BUFFERS = 16
BUFFER_BYTES = 4 << 20
PINNED_BYTES = BUFFERS * BUFFER_BYTES
"""Limit of page-locked memory for all passes on a device."""
COPY_STREAM_BYTES = PINNED_BYTES + 7 * BUFFER_BYTES
"""Limit of device memory: PINNED_BYTES, and a buffer's KV while it is unpacked and rotated."""
ALIGNMENT = 16
"""Alignment of the first tensor of a part, in bytes: what a GPU reads at once."""
TABLE_BYTES = 48 << 10
"""Room of each buffer for the table of a kernel, beside KV."""

_LOG = logging.getLogger(__name__)


class Event(Protocol):
    """A point in a stream's queue, like torch.cuda.Event."""

    def query(self) -> bool:
        """Return whether the device has reached it."""

    def synchronize(self) -> None:
        """Block this thread until the device has reached it; not for the model's thread."""


class CopyStream:
    """The copy stream of a CUDA device. The compute stream is the calling thread's own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # torch does not type what makes streams and events.
        self._stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def pinned(self, nbytes: int) -> Tensor:
        """Return page-locked memory; ordinary memory, which is slower, if there is none."""
        try:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            _LOG.warning("no page-locked memory, so chunk KV is copied slowly: %s", error)
            return torch.empty(nbytes, dtype=torch.uint8)

    def scratch(self, nbytes: int) -> Tensor:
        """Return device memory that is allocated for the copy stream, (nbytes,) uint8."""
        with torch.cuda.stream(self._stream):
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def has(self, tensor: Tensor) -> bool:
        """Return whether a tensor is on the device."""
        return tensor.is_cuda

    def is_pinned(self, tensor: Tensor) -> bool:
        """Return whether a tensor is in page-locked memory, so that it can be copied directly."""
        return tensor.is_pinned()

    def worked(self) -> Event:
        """Return an event recorded now on the compute stream."""
        return _event(torch.cuda.current_stream(self._device))

    def carried(self) -> Event:
        """Return an event recorded now on the copy stream."""
        return _event(self._stream)

    def follow(self, event: Any) -> None:
        """Make the copy stream wait for an event."""
        self._stream.wait_event(event)

    def hold_work(self, event: Any) -> None:
        """Make the compute stream wait for an event."""
        torch.cuda.current_stream(self._device).wait_event(event)

    def copy(self, into: Tensor, tensor: Tensor) -> None:
        """Copy on the copy stream; the caller keeps both tensors until a later event."""
        with torch.cuda.stream(self._stream):
            into.copy_(tensor, non_blocking=True)

    def run(self, work: Callable[[], object]) -> None:
        """Run a function with the copy stream as the current stream."""
        with torch.cuda.stream(self._stream):
            work()

    def share(self, *tensors: Tensor) -> None:
        """Keep tensors' memory from being reused until the copy stream has finished its queue."""
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
    """A host and a device buffer for copies, (bytes,) uint8 each. used: bytes in use.

    table_bytes: those at the end that are not for KV, but for a table that is copied with it.
    until: the event after which it can be reused. held: objects to keep alive until then.
    """

    host: Tensor
    device: Tensor
    table_bytes: int = 0
    used: int = 0
    until: Event | None = None
    held: Sequence[Tensor] = ()

    def rows(self, row_bytes: int, beside: int = 0) -> int:
        """Return how many rows of ``row_bytes`` still fit if ``beside`` more bytes are used."""
        room = self.host.numel() - self.table_bytes - _aligned(self.used, ALIGNMENT)
        return max(0, room - _aligned(beside, ALIGNMENT)) // row_bytes

    def place(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return contiguous space for such a tensor, on the host and on the device."""
        start = _aligned(self.used, math.gcd(ALIGNMENT, like.nbytes))
        here = slice(start, start + like.nbytes)
        self.used = here.stop
        host, device = (
            part[here].view(like.dtype).view(like.shape) for part in (self.host, self.device)
        )
        return host, device


def _aligned(nbytes: int, to: int) -> int:
    return -(-nbytes // to) * to


class PinnedBuffers:
    """The buffers of a device, shared by all passes: made when first needed, then reused.

    writer: the thread that waits for copies from the device. stager: the thread that copies KV from
    ordinary memory into buffers. table_bytes: see PinnedBuffer; 0 if no kernel places chunks.
    """

    def __init__(
        self,
        copy_stream: CopyStream,
        most: int = BUFFERS,
        nbytes: int = BUFFER_BYTES,
        *,
        table_bytes: int = 0,
    ) -> None:
        self.copy_stream = copy_stream
        self.writer = ThreadPoolExecutor(1, thread_name_prefix="kv-cut")
        self.stager: Executor = ThreadPoolExecutor(1, thread_name_prefix="kv-stage")
        self._left, self._nbytes, self.table_bytes = most, nbytes + table_bytes, table_bytes
        self._lock = threading.Lock()
        self._free: list[PinnedBuffer] = []
        self._busy: list[PinnedBuffer] = []
        self._held: dict[int, tuple[Sequence[Tensor], Event]] = {}

    def take(self) -> PinnedBuffer | None:
        """Return an empty buffer; None while all are in use by the device."""
        with self._lock:
            self._collect()
            if not self._free and self._left:
                pinned, scratch = (
                    self.copy_stream.pinned(self._nbytes),
                    self.copy_stream.scratch(self._nbytes),
                )
                self._left -= 1  # not before: there may be no memory for it
                return PinnedBuffer(pinned, scratch, self.table_bytes)
            return self._free.pop() if self._free else None

    def give(
        self, buffer: PinnedBuffer, until: Event | None = None, held: Sequence[Tensor] = ()
    ) -> None:
        """Return a buffer; it and ``held`` are kept until the device has reached an event."""
        buffer.until, buffer.held = until, held
        with self._lock:
            self._busy.append(buffer)
            self._collect()

    def hold(self, held: Sequence[Tensor], until: Event) -> None:
        """Keep tensors that are in no buffer until the device has reached an event.

        A later event for the same sequence takes the place of the one before. Tensors are let go of
        when others are held, or when a buffer is taken, given back or released.
        """
        with self._lock:
            if id(held) not in self._held:
                self._collect()
            self._held[id(held)] = held, until

    def release(self) -> int:
        """Free the buffers that are not in use; returns their bytes, on host and device."""
        with self._lock:
            self._collect()
            count = len(self._free)
            self._free.clear()
            self._left += count
        return 2 * count * self._nbytes

    def _collect(self) -> None:
        held = self._held.items()
        self._held = {key: each for key, each in held if not each[1].query()}
        busy, self._busy = self._busy, []
        for buffer in busy:
            if buffer.until is not None and not buffer.until.query():
                self._busy.append(buffer)
                continue
            buffer.used, buffer.until, buffer.held = 0, None, ()
            self._free.append(buffer)


def release_buffers(device: torch.device) -> int:
    """Free unused buffers for copies to the device and for reads; returns their size in bytes."""
    buffers = pinned_buffers_of(device)
    freed = 0 if buffers is None else buffers.release()
    return freed + OF_PROCESS.release()


def has_copy_stream(device: torch.device) -> bool:
    """Whether a device copies and unpacks KV on a separate stream."""
    return device.type == "cuda"


def pinned_buffers_of(device: torch.device) -> PinnedBuffers | None:
    """Return a device's buffers; None if copies need none, as on a CPU."""
    if not has_copy_stream(device):
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    return _cuda_pinned_buffers(index)


@cache
def _cuda_pinned_buffers(index: int) -> PinnedBuffers:
    device = torch.device("cuda", index)
    table_bytes = TABLE_BYTES if has_kernel(device) else 0
    return PinnedBuffers(CopyStream(device), table_bytes=table_bytes)
