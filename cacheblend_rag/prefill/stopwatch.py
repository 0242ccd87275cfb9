"""Measures the seconds of a request's phases, and when each phase began."""

from __future__ import annotations

import time

import torch

from cacheblend_rag.blend.passes import synchronize


class Stopwatch:
    """Adds up seconds by phase; on an accelerator ``lap`` first synchronizes.

    seconds: by phase. starts: readings of ``time.perf_counter`` when phases first began. Both
    dictionaries are updated in place.
    """

    def __init__(
        self,
        device: torch.device,
        seconds: dict[str, float] | None = None,
        starts: dict[str, float] | None = None,
    ) -> None:
        self.device = device
        self.seconds = {} if seconds is None else seconds
        self.starts = {} if starts is None else starts
        self.skip()

    def skip(self) -> None:
        """Discard the time since the last reading."""
        self._last = time.perf_counter()

    def lap(self, phase: str, *, waits: bool = True) -> None:
        """Add the time since the last reading to ``phase``.

        waits: for an accelerator's queue; else what is queued counts for the next phase.
        """
        if waits:
            synchronize(self.device)
        now = time.perf_counter()
        self.add(phase, now - self._last, self._last)
        self._last = now

    def add(self, phase: str, seconds: float, began: float) -> None:
        """Add seconds that were measured elsewhere; began: when they began to be spent."""
        self.starts.setdefault(phase, began)
        self._add(phase, seconds)

    def move(self, seconds: float, source: str, target: str, began: float | None = None) -> None:
        """Move some seconds from one phase to another; began: when they began to be spent."""
        if began is not None:
            self.starts.setdefault(target, began)
        self._add(source, -seconds)
        self._add(target, seconds)

    def _add(self, phase: str, seconds: float) -> None:
        self.seconds[phase] = max(0.0, self.seconds.get(phase, 0.0) + seconds)  # rounding
