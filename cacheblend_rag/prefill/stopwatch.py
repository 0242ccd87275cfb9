"""Stopwatch: seconds by phase of a request, and when each phase began."""

from __future__ import annotations

import time

import torch

from cacheblend_rag.blend.passes import synchronize


class Stopwatch:
    """Adds up seconds by phase; on an accelerator each reading waits for the work queued so far.

    seconds: by phase. starts: readings of ``time.perf_counter`` when phases first began. Both are
    added to where they are given.
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
        """Charge the time since the last reading to nothing."""
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        """Charge the time since the last reading to ``phase``."""
        synchronize(self.device)
        self.starts.setdefault(phase, self._last)
        self._add(phase, time.perf_counter() - self._last)
        self.skip()

    def move(self, seconds: float, source: str, target: str, began: float | None = None) -> None:
        """Charge some of one phase's seconds to another; began: when those were first spent."""
        if began is not None:
            self.starts.setdefault(target, began)
        self._add(source, -seconds)
        self._add(target, seconds)

    def _add(self, phase: str, seconds: float) -> None:
        self.seconds[phase] = self.seconds.get(phase, 0.0) + seconds
