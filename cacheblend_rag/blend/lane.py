"""Lane: a device's copies, queued beside its work; Stages: the page-locked memory they cross.

A device does what it was asked in the order of each of its streams. The lane is one more stream, of
copies, that runs while the work's stream computes. What one stream makes and the other uses is kept
in order by marks, which the device waits for; the host waits for none.
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

STAGES = 16
STAGE_BYTES = 4 << 20
STAGED_BYTES = STAGES * STAGE_BYTES
"""Most page-locked memory of all passes on a device."""
LANE_BYTES = STAGED_BYTES + 7 * STAGE_BYTES
"""Most memory of the device: as much again, and what a stage's unpacked, turned KV takes."""
ALIGNMENT = 8
"""Of the first tensor of a part; no number has more bytes."""

_LOG = logging.getLogger(__name__)


class Mark(Protocol):
    """A point in what a stream was asked to do."""

    def query(self) -> bool:
        """Whether the device is past it."""

    def synchronize(self) -> None:
        """Have this thread wait until it is; not for the thread that drives the model."""


class Lane(Protocol):
    """What of a device a transfer asks for. Its work's stream is the calling thread's own."""

    def pinned(self, nbytes: int) -> Tensor:
        """Return page-locked memory, (nbytes,) uint8."""

    def scratch(self, nbytes: int) -> Tensor:
        """Return memory of the device that belongs to the lane, (nbytes,) uint8."""

    def has(self, tensor: Tensor) -> bool:
        """Whether it lies on the device."""

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether it lies in page-locked memory, so that it can be copied from there."""

    def worked(self) -> Mark:
        """Return the mark behind all that the work's stream was asked so far."""

    def carried(self) -> Mark:
        """Return the mark behind all that the lane was asked so far."""

    def follow(self, mark: Mark) -> None:
        """Have the lane wait for a mark."""

    def hold_work(self, mark: Mark) -> None:
        """Have the work's stream wait for a mark."""

    def copy(self, into: Tensor, tensor: Tensor) -> None:
        """Copy on the lane; who asks keeps both until a mark behind it."""

    def run(self, work: Callable[[], object]) -> None:
        """Do on the lane what asks the device for something."""

    def share(self, *tensors: Tensor) -> None:
        """Keep tensors of the work's stream from other use until the lane is past its queue."""


class CudaLane:
    """The lane of a CUDA device."""

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

    def worked(self) -> Mark:
        return _mark(torch.cuda.current_stream(self._device))

    def carried(self) -> Mark:
        return _mark(self._stream)

    def follow(self, mark: Any) -> None:
        self._stream.wait_event(mark)

    def hold_work(self, mark: Any) -> None:
        torch.cuda.current_stream(self._device).wait_event(mark)

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


def _mark(stream: torch.cuda.Stream) -> torch.cuda.Event:
    # A thread that waits for it sleeps.
    mark: torch.cuda.Event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    mark.record(stream)
    return mark


@dataclass
class Stage:
    """Memory that a copy passes through: host and device, (bytes,) uint8 each. used: bytes of it.

    until: the mark after which it can be used anew. held: what must be there until then.
    """

    host: Tensor
    device: Tensor
    used: int = 0
    until: Mark | None = None
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


class Stages:
    """The stages of a device, for all passes: made when first needed, used over and over.

    writer: the thread that waits for what comes from the device.
    """

    def __init__(self, lane: Lane, most: int = STAGES, nbytes: int = STAGE_BYTES) -> None:
        self.lane, self.writer = lane, ThreadPoolExecutor(1, thread_name_prefix="kv-cut")
        self._left, self._nbytes = most, nbytes
        self._lock = threading.Lock()
        self._free: list[Stage] = []
        self._busy: list[Stage] = []

    def take(self) -> Stage | None:
        """Return an empty stage; None while the device needs them all."""
        with self._lock:
            self._collect()
            if not self._free and self._left:
                pinned, scratch = self.lane.pinned(self._nbytes), self.lane.scratch(self._nbytes)
                self._left -= 1  # not before: there may be no memory for it
                return Stage(pinned, scratch)
            return self._free.pop() if self._free else None

    def give(self, stage: Stage, until: Mark | None = None, held: Sequence[Tensor] = ()) -> None:
        """Give a stage back; it and ``held`` are kept until the device is past a mark."""
        stage.until, stage.held = until, held
        with self._lock:
            self._busy.append(stage)
            self._collect()

    def release(self) -> int:
        """Let go of the stages that are not in use; returns their bytes, on the host and there."""
        with self._lock:
            self._collect()
            count = len(self._free)
            self._free.clear()
            self._left += count
        return 2 * count * self._nbytes

    def _collect(self) -> None:
        busy, self._busy = self._busy, []
        for stage in busy:
            if stage.until is not None and not stage.until.query():
                self._busy.append(stage)
                continue
            stage.used, stage.until, stage.held = 0, None, ()
            self._free.append(stage)


def release_stages(device: torch.device) -> int:
    """Let go of a device's stages that are not in use, if it has any; returns their bytes."""
    stages = stages_of(device)
    return 0 if stages is None else stages.release()


def has_lane(device: torch.device) -> bool:
    """Whether what a device is sent is copied, and unpacked, beside its work."""
    return device.type == "cuda"


def stages_of(device: torch.device) -> Stages | None:
    """Return a device's stages; None where copies are plain ones, as between a CPU and itself."""
    if not has_lane(device):
        return None
    index = torch.cuda.current_device() if device.index is None else device.index
    return _cuda_stages(index)


@cache
def _cuda_stages(index: int) -> Stages:
    return Stages(CudaLane(torch.device("cuda", index)))
