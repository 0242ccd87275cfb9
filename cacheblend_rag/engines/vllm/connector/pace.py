"""Limits slices of work in time, also on asynchronous devices.

``OwnTime`` measures the total time of slices, without other work in between.
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

    busy: while other requests run. idle: while none does; the longest that a new request waits.
    """

    busy: float
    idle: float

    @classmethod
    def of(cls, device: torch.device, busy: float | None = None) -> Slices:
        """Return a device's default: decode steps take 8 ms on a GPU, 30 to 100 ms on a CPU."""
        usual, idle_slices = (0.03, 8) if device.type == "cpu" else (0.005, 4)
        busy = usual if busy is None else busy
        return cls(busy, busy * idle_slices)


MOST_STEPS_AHEAD = 16
"""Steps after which ranks agree again: one may take far longer than those before it."""


def steps_ahead(left: float, seconds: float, steps: int) -> int:
    """Return how many steps fit into the time left, at least one.

    left: seconds. seconds: of the ``steps`` done before.
    """
    fit = left * steps / seconds if seconds > 0 else 1.0
    return max(1, min(MOST_STEPS_AHEAD, int(fit)))


class OwnTime:
    """A clock that runs only inside its ``with`` block."""

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

    An accelerator queues work faster than it executes it, so by the host's clock alone
    a slice would queue work for many times its length. Waiting for the step before the last one
    keeps the device busy and the time correct.

    make_event: returns an event that can be recorded and synchronized; None on a CPU.
    """

    def __init__(self, make_event: Callable[[], Any] | None) -> None:
        self._make_event = make_event
        self._before: Any = None

    @classmethod
    def of(cls, device: torch.device) -> Pace:
        """Return the pace of a device."""
        return cls(None if device.type == "cpu" else lambda: torch.Event(device))

    def is_over(self, until: float) -> bool:
        """Record that a step was queued, wait for the one before; return whether time is up."""
        if self._make_event is not None:
            queued = self._make_event()
            queued.record()
            if self._before is not None:
                self._before.synchronize()
            self._before = queued
        return time.perf_counter() >= until
