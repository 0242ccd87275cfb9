"""Decides from measured speeds which stored chunks to load, and how much to recompute.

A pass computes while chunk KV is being loaded. So a blended prefill takes as long as loading or
computing, whichever is longer, and recomputing that fits into the loading time is free.

Every time is estimated from the median of the latest measurements, which expire, so that what was
rejected is measured again.

Source: the loading controller of CacheBlend (arXiv 2405.16444, section 5), which takes the largest
ratio whose recompute hides behind the load; here with measured speeds, a decision for each chunk,
and ordinary prefill if no chunk is worth loading.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from cacheblend_rag.blend.cost import Forecast, LayerCost, prefill_cost
from cacheblend_rag.blend.rows import Mask
from cacheblend_rag.blend.schedule import plan_schedule
from cacheblend_rag.kv.timings import Estimate, Speeds
from cacheblend_rag.reason import Reason, ReasonCode
from cacheblend_rag.settings import AUTO, DEFAULT_RATIO, BlendConfig

MARGIN = 1.1
"""A way must look so many times slower than another before it is rejected."""
KEEP_SECONDS = 120.0
"""Age at which measurements of passes and of ordinary prefill expire."""
STEPS = 20
"""Ratios that are tried between the bounds, to find the largest that hides."""


class Rates(Speeds):
    """Measured floating-point operations per second of this machine.

    Of scattered rows ("blend") and of whole prompts ("prefill").
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock, KEEP_SECONDS)


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


def _seconds(estimate: Estimate | None, units: float) -> float | None:
    """Return the estimated seconds of so much work; None with too few measurements."""
    return estimate.seconds(units) if estimate is not None and estimate.is_known else None


@dataclass(frozen=True, slots=True)
class _Guess:
    """The estimated seconds of one way. computing: None if unknown."""

    load: tuple[StoredPart, ...]
    config: BlendConfig
    loading: float
    computing: float | None

    @property
    def hides(self) -> bool:
        """Whether computing takes no longer than loading."""
        return self.computing is None or self.computing <= self.loading

    def seconds(self, layers: int) -> float | None:
        """Return the total time: the first layer is waited for, the others overlap."""
        if self.computing is None:
            return None
        return max(self.loading, self.computing) + self.loading / layers


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

        A way that was not measured often enough is tried, which measures it. held: so many first
        tokens are computed by no way, nor by ordinary prefill, since their KV is there.
        """
        layers = len(self.costs)
        ways = [self._guess(tokens, load, config, held) for load in self._choices(parts)]
        work = prefill_cost(self.costs, tokens) - prefill_cost(self.costs, held)
        everything, full = ways[0], _seconds(self.rates.of("prefill"), work)
        timed = [(spent, way) for way in ways if (spent := way.seconds(layers)) is not None]
        if not config.cost_model or full is None or len(timed) < len(ways):
            return Decision(everything.load, everything.config, self._told(everything, config))
        quickest = min(timed, key=lambda one: one[0])
        spent, best = quickest if timed[0][0] > MARGIN * quickest[0] else timed[0]
        if spent <= MARGIN * full:
            return Decision(best.load, best.config, self._told(best, config, parts))
        took = f"ordinary prefill takes {_ms(full)}, blending would take {_ms(spent)}"
        return Decision((), everything.config, Reason(ReasonCode.SLOW, took))

    def _choices(self, parts: Sequence[StoredPart]) -> list[tuple[StoredPart, ...]]:
        """All parts, and those without the slowest tier, the two slowest, ...; at least one."""
        tiers = sorted({part.tier for part in parts}, key=self._slowness)
        kept = [set(tiers[:count]) for count in range(len(tiers), 0, -1)]
        return [tuple(part for part in parts if part.tier in some) for some in kept] or [()]

    def _slowness(self, tier: str) -> float:
        return _seconds(self.speeds.of(tier), 1 << 20) or 0.0

    def _loading(self, parts: Sequence[StoredPart]) -> float:
        """Return the loading time: tiers are read at once, parts of one share its bandwidth."""
        total: dict[str, int] = {}
        for part in parts:
            total[part.tier] = total.get(part.tier, 0) + part.nbytes
        times = [_seconds(self.speeds.of(tier), nbytes) for tier, nbytes in total.items()]
        return max((read for read in times if read is not None), default=0.0)

    def _guess(
        self, tokens: int, parts: tuple[StoredPart, ...], config: BlendConfig, held: int
    ) -> _Guess:
        loading = self._loading(parts)
        forecast = Forecast(self.costs, *masks_of(tokens, parts, held))

        def guess(ratio: float | None) -> _Guess:
            own = config if ratio is None else config.with_ratio(ratio)
            work = forecast.work(plan_schedule(own, len(self.costs)))
            return _Guess(parts, own, loading, _seconds(self.rates.of("blend"), work))

        if config.recompute_ratio != AUTO:
            return guess(None)
        low, high = config.ratio_bounds
        least = guess(low)
        if least.computing is None:
            return guess(min(max(DEFAULT_RATIO, low), high))
        tried = (guess(round(low + (high - low) * step / STEPS, 4)) for step in range(STEPS, 0, -1))
        return next((one for one in tried if one.hides), least)

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


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:,.0f} ms"
