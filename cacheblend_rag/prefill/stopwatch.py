"""Measures the seconds of a request's phases, and charges the time of a blend pass to them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from cacheblend_rag.blend.passes import BlendPass, PassStats, synchronize


class Stopwatch:
    """Adds up seconds by phase; on an accelerator ``lap`` first synchronizes.

    Loading takes place within other phases, whose time it is not. seconds: by phase. starts:
    readings of ``time.perf_counter`` when phases first began. Both dictionaries are updated in
    place. load_by_tier: seconds of waiting for stored KV. laid: seconds of copying it.
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
        self.skip()

    def skip(self) -> None:
        """Discard the time since the last reading."""
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

    def move(self, seconds: float, source: str, target: str, began: float | None) -> None:
        """Move some seconds from one phase to another; began: when they began to be spent."""
        if began is not None:
            self.starts.setdefault(target, began)
        self._add(source, -seconds)
        self._add(target, seconds)

    @contextmanager
    def laying(self) -> Iterator[None]:
        """Count the time inside as copying.

        On an accelerator that is the time to queue the copies, which it makes later.
        """
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


class PassTimes:
    """The phases of a prompt's pass, over the stopwatch of the prompt.

    An accelerator is waited for only where the pass waits for it anyway: once chunks are found,
    after a probe, at each choice of rows, and at the end. In between the host only queues work. So
    there, ``lay_in`` is the time to queue copies; a copy that is not done when a layer needs it
    counts for the phase of that layer. ``load`` is the host's own waiting.
    """

    def __init__(self, watch: Stopwatch) -> None:
        self._watch = watch
        self._phase, self._selected = "recompute", 0.0
        self._stats: PassStats | None = None

    def probe(self) -> None:
        """Begin a probe: all of it is selection."""
        self._watch.lap("lay_in", waits=False)  # the buffer, and what stands where in it
        self._phase, self._stats = "selection", None

    def layers(self, run: BlendPass) -> None:
        """Begin the layers; those before the first check layer have a phase of their own."""
        self._watch.lap("lay_in", waits=False)
        is_early = min(run.schedule.checks, default=0) > 0
        self._phase, self._stats = "early_layers" if is_early else "recompute", run.stats
        self._selected = 0.0

    def check(self) -> None:
        """Note that a check begins; the accelerator has just been waited for."""
        if self._phase == "early_layers":
            self._end(waits=False)
            self._phase = "recompute"

    def end(self) -> None:
        """End a probe or the layers, as far as they came."""
        self._end(waits=True)

    def _end(self, *, waits: bool) -> None:
        self._watch.lap(self._phase, waits=waits)
        if (stats := self._stats) is not None and stats.selection_seconds > self._selected:
            chosen = stats.selection_seconds - self._selected
            self._selected = stats.selection_seconds
            self._watch.move(chosen, self._phase, "selection", stats.selection_began)
