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


class HostEvent:
    """An event on the host, like ``torch.Event`` on a device."""

    def record(self) -> None:
        """Record the current time."""
        self._at = time.perf_counter()

    def query(self) -> bool:
        """Return True: it has been reached."""
        return True

    def synchronize(self) -> None:
        """Return at once, for the same reason."""

    def elapsed_time(self, end: HostEvent, /) -> float:
        """Return the milliseconds from this to another one."""
        return (end._at - self._at) * 1000


MakeEvent = Callable[[], Any]
"""Returns a new event, which can be recorded, asked for and waited for."""


def events_of(device: torch.device) -> MakeEvent:
    """Return the maker of a device's events."""
    if device.type == "cpu":
        return HostEvent
    return lambda: torch.Event(device, enable_timing=True)


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
    """

    def __init__(self, make_event: MakeEvent) -> None:
        self._make_event = make_event
        self._before: Any = None

    def is_over(self, until: float) -> bool:
        """Record that a step was queued, wait for the one before; return whether time is up."""
        queued = self._make_event()
        queued.record()
        if self._before is not None:
            self._before.synchronize()
        self._before = queued
        return time.perf_counter() >= until
