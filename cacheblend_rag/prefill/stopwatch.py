"""Measures the seconds of a request's phases."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from cacheblend_rag.blend.passes import synchronize


class Stopwatch:
    """Adds up seconds by phase; on an accelerator ``lap`` first synchronizes.

    A pass enters one phase after another. An accelerator is waited for only where the pass waits
    for it anyway: once chunks are found, after a probe, at each choice of rows, and at the end. In
    between the host only queues work. So there, ``lay_in`` is the time to queue copies; a copy that
    is not done when a layer needs it counts for the phase of that layer. ``load`` is the host's own
    waiting. Both take place within other phases, whose time they are not.

    seconds: by phase. starts: readings of ``time.perf_counter`` when phases first began. Both
    dictionaries are updated in place. load_by_tier: seconds of waiting for stored KV. laid: seconds
    of copying it.
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
        self.load_by_tier: dict[str, float] = {}
        self.laid = self._loading = 0.0
        self._phase = "lay_in"
        self._last = time.perf_counter()

    def lap(self, phase: str, *, waits: bool = True) -> None:
        """Add the time since the last reading to ``phase``, without that of loading in it.

        waits: for an accelerator's queue; else what is queued counts for the next phase.
        """
        if waits:
            synchronize(self.device)
        now = time.perf_counter()
        self.starts.setdefault(phase, self._last)
        self._add(phase, now - self._last - self._loading)
        self._last, self._loading = now, 0.0

    def enter(self, phase: str, *, waits: bool = True) -> None:
        """End the phase of a pass that the time since the last reading belongs to; begin another.

        waits: as for lap.
        """
        self.lap(self._phase, waits=waits)
        self._phase = phase

    @contextmanager
    def selecting(self, layer: int | None) -> Iterator[None]:
        """Count the time inside as the phase ``selection``; the device finishes earlier work first.

        layer: the check layer, from which on the pass recomputes; None before layer 0.
        """
        before = self._phase
        self.enter("selection")
        yield
        self.enter(before if layer is None else "recompute", waits=False)

    @contextmanager
    def laying(self) -> Iterator[None]:
        """Count the time inside as copying."""
        began = time.perf_counter()
        self.starts.setdefault("lay_in", began)
        try:
            yield
        finally:
            spent = time.perf_counter() - began
            self.laid += spent
            self._load("lay_in", spent)

    def waited(self, began: float, seconds: Mapping[str, float]) -> None:
        """Add a wait for stored KV, by tier."""
        self.starts.setdefault("load", began)
        for tier, share in seconds.items():
            self.load_by_tier[tier] = self.load_by_tier.get(tier, 0.0) + share
            self._load("load", share)

    def _load(self, phase: str, seconds: float) -> None:
        self._loading += seconds
        self._add(phase, seconds)

    def _add(self, phase: str, seconds: float) -> None:
        self.seconds[phase] = max(0.0, self.seconds.get(phase, 0.0) + seconds)  # rounding
