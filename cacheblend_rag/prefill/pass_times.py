"""Charges the time of a blend pass to its phases."""

from __future__ import annotations

from cacheblend_rag.blend.passes import BlendPass, PassStats
from cacheblend_rag.prefill.load_times import LoadTimes
from cacheblend_rag.prefill.stopwatch import Stopwatch


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
