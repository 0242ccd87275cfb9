"""Pace: when a slice of work is over, on devices that compute behind the host's back, too.

OwnTime: how long slices were, without what others did in between.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch


@dataclass(frozen=True)
class Slices:
    """How long to work between two of vLLM's steps, in seconds.

    busy: while others are computed. idle: while nothing else is, so that a newcomer waits no
    longer.
    """

    busy: float
    idle: float

    @classmethod
    def of(cls, device: torch.device, busy: float | None = None) -> Slices:
        """Return what suits a device: decoding steps take 8 ms on a GPU, 30 to 100 on a CPU."""
        usual, idle_slices = (0.03, 8) if device.type == "cpu" else (0.005, 4)
        busy = usual if busy is None else busy
        return cls(busy, busy * idle_slices)


class OwnTime:
    """A clock that runs inside of its ``with`` only."""

    def __init__(self) -> None:
        self._total, self._since = 0.0, 0.0
        self._runs = False

    def __enter__(self) -> Self:
        self._since, self._runs = time.perf_counter(), True
        return self

    def __exit__(self, *_: object) -> None:
        self._total, self._runs = self.seconds(), False

    def seconds(self) -> float:
        """Return the seconds that it has run."""
        return self._total + (time.perf_counter() - self._since if self._runs else 0.0)


class Pace:
    """Keeps the host one step ahead of the device, and no further.

    An accelerator takes orders faster than it carries them out, so the host's clock alone would let
    a slice queue work for many times its length. Waiting for the step before the last one keeps the
    device at work and the clock honest.

    make_event: returns something that can be recorded and synchronized with; None on a CPU.
    """

    def __init__(self, make_event: Callable[[], Any] | None) -> None:
        self._make_event = make_event
        self._before: Any = None

    @classmethod
    def of(cls, device: torch.device) -> Pace:
        """Return the pace of a device."""
        return cls(None if device.type == "cpu" else lambda: torch.Event(device))

    def is_over(self, until: float) -> bool:
        """Note that a step was queued; whether time is up, once the step before it is done."""
        if self._make_event is not None:
            queued = self._make_event()
            queued.record()
            if self._before is not None:
                self._before.synchronize()
            self._before = queued
        return time.perf_counter() >= until
