"""Decides from measured speeds which stored chunks to load, and how much to recompute.

A pass computes while chunk KV is being loaded. So a blended prefill takes as long as loading or
computing, whichever is longer, and recomputing that fits into the loading time is free.

Every time is estimated from the medians of the latest measurements, with their spread. A way is
preferred to another only if that spread does not explain the difference; and a rejected way is
tried again now and then, to notice if it has become faster.

Source: the loading controller of CacheBlend (arXiv 2405.16444, section 5), which takes the largest
ratio whose recompute hides behind the load; here with measured speeds, a decision for each chunk,
and ordinary prefill if no chunk is worth loading.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from cacheblend_rag.blend.cost import Forecast, LayerCost, prefill_cost
from cacheblend_rag.blend.rows import Mask
from cacheblend_rag.blend.schedule import plan_schedule
from cacheblend_rag.kv.timings import Estimate, Speeds, Timings
from cacheblend_rag.reason import Reason, ReasonCode
from cacheblend_rag.settings import AUTO, DEFAULT_RATIO, BlendConfig

Kind = Literal["prefill", "blend"]

WORTH_SPREADS = 3.0
"""How many times the measured spread both estimates may be off without changing the decision."""
MARGIN = 1.1
"""A way must look so many times slower than another before it is rejected."""
RETRY_SECONDS = 30.0
"""Seconds between trial blends while blending is rejected."""
KEEP_SECONDS = 600.0
"""Age at which measurements of passes and of ordinary prefill expire."""
STEPS = 20
"""Ratios that are tried between the bounds, to find the largest that hides."""


class Rates:
    """Measured operations per second of this machine. Thread-safe.

    clock: returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._timings: dict[str, Timings] = {}
        self._tried_at = 0.0
        self._lock = threading.Lock()

    def record(self, kind: Kind, work: float, seconds: float) -> None:
        """Record the seconds of so many floating-point operations."""
        if work <= 0 or seconds <= 0:
            return
        with self._lock:
            timings = self._timings.setdefault(kind, Timings(KEEP_SECONDS, self._clock))
            timings.add(work, seconds)
            if kind == "blend":
                self._tried_at = self._clock()

    def of(self, kind: Kind) -> Estimate | None:
        """Return operations per second; scattered rows and whole prompts have separate rates."""
        with self._lock:
            timings = self._timings.get(kind)
            return None if timings is None else timings.estimate()

    def try_again(self) -> bool:
        """Whether to try a blend although it looks slow: one prompt per RETRY_SECONDS."""
        with self._lock:
            is_time = self._clock() - self._tried_at >= RETRY_SECONDS
            if is_time:
                self._tried_at = self._clock()
            return is_time


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A chunk of a prompt, or a block of its prefix, whose KV is stored.

    tier, nbytes: where, and how much to read. protected: how many of its tokens stay as stored.
    is_chunk: False for a block of a prefix.
    """

    start: int
    end: int
    tier: str
    nbytes: int
    protected: int = 0
    is_chunk: bool = True


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision for a prompt.

    load: which of its stored parts to load. config: with the chosen ratio. why: in one line, None
    if there was no choice.
    """

    load: tuple[StoredPart, ...]
    config: BlendConfig
    why: Reason | None = None


@dataclass(frozen=True, slots=True)
class _Time:
    """An estimated duration. spread: its median relative error."""

    seconds: float
    spread: float = 0.0

    @classmethod
    def of(cls, estimate: Estimate | None, units: float) -> _Time | None:
        """Return the estimate for so much work; None with too few measurements."""
        if estimate is None or not estimate.is_known:
            return None
        return cls(estimate.seconds(units), estimate.spread)

    def is_sooner(self, other: _Time) -> bool:
        """Whether it is shorter than another, even if both estimates are off by their spread."""
        longer = self.seconds * (1 + WORTH_SPREADS * self.spread)
        return other.seconds / (1 + WORTH_SPREADS * other.spread) > MARGIN * longer


@dataclass(frozen=True, slots=True)
class _Guess:
    """The estimated times of one way. computing: None if unknown."""

    load: tuple[StoredPart, ...]
    config: BlendConfig
    loading: _Time
    computing: _Time | None

    @property
    def hides(self) -> bool:
        """Whether computing takes no longer than loading."""
        return self.computing is None or self.computing.seconds <= self.loading.seconds

    def time(self, layers: int) -> _Time | None:
        """Return the total time: the first layer is waited for, the others overlap."""
        if self.computing is None:
            return None
        longer = max(self.loading.seconds, self.computing.seconds)
        spread = max(self.loading.spread, self.computing.spread)
        return _Time(longer + self.loading.seconds / layers, spread)


@dataclass(frozen=True)
class Controller:
    """Decides for one model and store. costs: of each of its layers."""

    costs: tuple[LayerCost, ...]
    rates: Rates
    speeds: Speeds

    def decide(
        self, tokens: int, parts: Sequence[StoredPart], config: BlendConfig, *, held: int = 0
    ) -> Decision:
        """Choose what to load of a prompt of so many tokens, and the ratio if it is "auto".

        A way that was not measured often enough is tried, which measures it. A way that looks too
        slow is tried again now and then. held: so many first tokens are computed by no way, nor by
        ordinary prefill, since their KV is there.
        """
        layers = len(self.costs)
        ways = [self._guess(tokens, load, config, held) for load in self._choices(parts)]
        work = prefill_cost(self.costs, tokens) - prefill_cost(self.costs, held)
        everything, full = ways[0], self._time("prefill", work)
        timed = [(spent, way) for way in ways if (spent := way.time(layers)) is not None]
        if not config.cost_model or full is None or len(timed) < len(ways):
            return Decision(everything.load, everything.config, self._told(everything, config))
        quickest = min(timed, key=lambda one: one[0].seconds)
        spent, best = quickest if quickest[0].is_sooner(timed[0][0]) else timed[0]
        if not full.is_sooner(spent):
            return Decision(best.load, best.config, self._told(best, config, parts))
        took = f"ordinary prefill takes {_ms(full)}, blending would take {_ms(spent)}"
        if self.rates.try_again():
            again = Reason(ReasonCode.RETRIED, f"tried again, though {took}")
            return Decision(everything.load, everything.config, again)
        return Decision((), everything.config, Reason(ReasonCode.SLOW, took))

    def _choices(self, parts: Sequence[StoredPart]) -> list[tuple[StoredPart, ...]]:
        """All parts, and those without the slowest tier, the two slowest, ...; at least one."""
        tiers = sorted({part.tier for part in parts}, key=self._slowness)
        kept = [set(tiers[:count]) for count in range(len(tiers), 0, -1)]
        return [tuple(part for part in parts if part.tier in some) for some in kept] or [()]

    def _slowness(self, tier: str) -> float:
        read = _Time.of(self.speeds.of(tier), 1 << 20)
        return 0.0 if read is None else read.seconds

    def _loading(self, parts: Sequence[StoredPart]) -> _Time:
        """Return the loading time: tiers are read at once, parts of one share its bandwidth."""
        total: dict[str, int] = {}
        for part in parts:
            total[part.tier] = total.get(part.tier, 0) + part.nbytes
        times = (_Time.of(self.speeds.of(tier), nbytes) for tier, nbytes in total.items())
        known = (read for read in times if read is not None)
        return max(known, key=lambda read: read.seconds, default=_Time(0.0))

    def _guess(
        self, tokens: int, parts: tuple[StoredPart, ...], config: BlendConfig, held: int
    ) -> _Guess:
        loading = self._loading(parts)
        forecast = Forecast(self.costs, *masks_of(tokens, parts, held))

        def guess(ratio: float | None) -> _Guess:
            own = config if ratio is None else config.with_ratio(ratio)
            work = forecast.work(plan_schedule(own, len(self.costs)))
            return _Guess(parts, own, loading, self._time("blend", work))

        if config.recompute_ratio != AUTO:
            return guess(None)
        low, high = config.ratio_bounds
        least = guess(low)
        if least.computing is None:
            return guess(min(max(DEFAULT_RATIO, low), high))
        tried = (guess(round(low + (high - low) * step / STEPS, 4)) for step in range(STEPS, 0, -1))
        return next((one for one in tried if one.hides), least)

    def _time(self, kind: Kind, work: float) -> _Time | None:
        return _Time.of(self.rates.of(kind), work)

    def _told(
        self, way: _Guess, asked: BlendConfig, parts: Sequence[StoredPart] = ()
    ) -> Reason | None:
        """Return what was chosen of these parts and why, if there was a choice."""
        said: list[Reason] = []
        chunks = sum(part.is_chunk for part in parts)
        if left := chunks - sum(part.is_chunk for part in way.load) if parts else 0:
            sooner = f"{left} of {chunks} stored chunks are computed sooner than loaded"
            said.append(Reason(ReasonCode.SOME_SLOW, sooner))
        if asked.recompute_ratio == AUTO:
            ratio = f"ratio {way.config.ratio:g}"
            if way.computing is None:
                unmeasured = f"{ratio}: nothing is measured yet"
                said.append(Reason(ReasonCode.RATIO_UNMEASURED, unmeasured))
            else:
                took = f"computing {_ms(way.computing)}, loading {_ms(way.loading)}"
                said.append(Reason(ReasonCode.RATIO_MEASURED, f"{ratio}: {took}"))
        return Reason(said[0].code, "; ".join(said)) if said else None


def masks_of(tokens: int, parts: Sequence[StoredPart], held: int = 0) -> tuple[Mask, Mask]:
    """Return which tokens have cached KV, and which of them may be recomputed, spread evenly.

    held: so many first tokens have KV that is not recomputed.
    """
    cached, eligible = np.zeros(tokens, dtype=np.bool_), np.zeros(tokens, dtype=np.bool_)
    cached[:held] = True
    for part in parts:
        cached[part.start : part.end] = True
        count = part.end - part.start
        free = count - part.protected
        eligible[part.start + np.arange(free) * count // max(free, 1)] = True
    return cached, eligible


def _ms(spent: _Time) -> str:
    return f"{spent.seconds * 1000:,.0f} ms"
