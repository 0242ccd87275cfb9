"""Measures the seconds of a request's phases, and charges the time of a blend pass to them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from cacheblend_rag.blend.passes import BlendPass, PassStats, synchronize


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


class LoadTimes:
    """Seconds since the last ``take``: of waiting for stored KV by tier, and of copying it.

    starts: readings of ``time.perf_counter`` when the phases ``load`` and ``lay_in`` first began.
    laid: all seconds of copying so far.
    """

    def __init__(self) -> None:
        self.starts: dict[str, float] = {}
        self.laid = self._taken = 0.0
        self._waits: dict[str, float] = {}

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
            self.laid += time.perf_counter() - began

    def waited(self, began: float, seconds: Mapping[str, float]) -> None:
        """Add a wait, by tier."""
        self.starts.setdefault("load", began)
        for tier, share in seconds.items():
            self._waits[tier] = self._waits.get(tier, 0.0) + share

    def take(self) -> tuple[dict[str, float], float]:
        """Return the seconds of waiting by tier, and of copying; counting begins anew."""
        waits, self._waits = self._waits, {}
        laid, self._taken = self.laid - self._taken, self.laid
        return waits, laid


class PassTimes:
    """The phases of a prompt's pass, over the stopwatch of the prompt.

    loading: times of loading. load_by_tier: gets the seconds of waiting, by tier.

    An accelerator is waited for only where the pass waits for it anyway: once chunks are found,
    after a probe, at each choice of rows, and at the end. In between the host only queues work. So
    there, ``lay_in`` is the time to queue copies; a copy that is not done when a layer needs it
    counts for the phase of that layer. ``load`` is the host's own waiting.
    """

    def __init__(
        self, watch: Stopwatch, loading: LoadTimes, load_by_tier: dict[str, float]
    ) -> None:
        self._watch, self._loading, self._load_by_tier = watch, loading, load_by_tier
        self._phase, self._selected = "recompute", 0.0
        self._stats: PassStats | None = None

    def probe(self) -> None:
        """Begin a probe: all of it is selection."""
        self._charge("lay_in", waits=False)  # the buffer, and what stands where in it
        self._phase, self._stats = "selection", None

    def layers(self, run: BlendPass) -> None:
        """Begin the layers; those before the first check layer have a phase of their own."""
        self._charge("lay_in", waits=False)
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
        self._charge(self._phase, waits=waits)
        if (stats := self._stats) is not None and stats.selection_seconds > self._selected:
            chosen = stats.selection_seconds - self._selected
            self._selected = stats.selection_seconds
            self._watch.move(chosen, self._phase, "selection", stats.selection_began)

    def _charge(self, phase: str, *, waits: bool) -> None:
        """Add the time since the last reading to a phase, without the time of loading in it."""
        self._watch.lap(phase, waits=waits)
        waited, laid = self._loading.take()
        starts = self._loading.starts
        for tier, seconds in waited.items():
            self._watch.move(seconds, phase, "load", starts["load"])
            self._load_by_tier[tier] = self._load_by_tier.get(tier, 0.0) + seconds
        if laid:
            self._watch.move(laid, phase, "lay_in", starts["lay_in"])
