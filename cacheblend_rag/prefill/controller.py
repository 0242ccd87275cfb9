"""Controller: whether a prompt's stored chunks are worth loading, and how much to recompute.

A pass computes while chunk KV is on its way. So the time of a blended prefill is that of loading or
that of computing, whichever is longer, and what is recomputed within the time of loading is free.

Source: the loading controller of CacheBlend (arXiv 2405.16444, section 5), which takes the largest
ratio whose recompute hides behind the load; here over speeds that were measured, with a decision
for each chunk, and ordinary prefill where no load is worth its time.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from cacheblend_rag.blend.cost import LayerCost, prefill_cost
from cacheblend_rag.blend.forecast import Forecast
from cacheblend_rag.blend.rows import Mask
from cacheblend_rag.blend.schedule import plan_schedule
from cacheblend_rag.config import AUTO, PRESET_RATIOS, BlendConfig
from cacheblend_rag.kv.speed import Speeds

Kind = Literal["prefill", "blend"]

WORTH_SECONDS = 0.1
"""Ordinary prefill that takes less is not held against blending: noise would decide."""
MARGIN = 1.1
"""Blending must look so many times slower than ordinary prefill before it is given up."""
STEPS = 20
"""Ratios that are tried between the bounds, to find the largest that hides."""
FADE = 0.7


class Rates:
    """How much work a second this machine does. May be used by several threads at once."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, float]] = {}
        self._lock = threading.Lock()

    def record(self, kind: Kind, work: float, seconds: float) -> None:
        """Note that so many floating-point operations took so long."""
        if work <= 0 or seconds <= 0:
            return
        with self._lock:
            done, took = self._sums.get(kind, (0.0, 0.0))
            self._sums[kind] = (FADE * done + work, FADE * took + seconds)

    def of(self, kind: Kind) -> float | None:
        """Return operations a second; scattered rows and whole prompts have rates of their own."""
        done, took = self._sums.get(kind, (0.0, 0.0))
        return done / took if took else None


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A chunk of a prompt whose KV is stored. tier, nbytes: where, and what is to be read."""

    start: int
    end: int
    tier: str
    nbytes: int
    protected: bool = False


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do about a prompt.

    load: which of its stored parts. config: with the ratio that was chosen. why: in one line, None
    where nothing had to be decided.
    """

    load: tuple[StoredPart, ...]
    config: BlendConfig
    why: str | None = None


@dataclass(frozen=True, slots=True)
class _Guess:
    """How long a way would take. computing: None where that is not known."""

    load: tuple[StoredPart, ...]
    config: BlendConfig
    loading: float
    computing: float | None

    def seconds(self, layers: int) -> float | None:
        """The first layer is waited for; the others come while layers are computed."""
        if self.computing is None:
            return None
        return max(self.loading, self.computing) + self.loading / layers


@dataclass(frozen=True)
class Controller:
    """Decides for one model and store. costs: of each of its layers."""

    costs: tuple[LayerCost, ...]
    rates: Rates
    speeds: Speeds

    def decide(self, tokens: int, parts: Sequence[StoredPart], config: BlendConfig) -> Decision:
        """Choose what to load of a prompt of so many tokens, and the ratio where it is "auto".

        What was not measured yet is tried: that measures it.
        """
        layers = len(self.costs)
        ways = [self._guess(tokens, load, config) for load in self._choices(parts)]
        everything, full = ways[0], self._seconds("prefill", prefill_cost(self.costs, tokens))
        timed = [(seconds, way) for way in ways if (seconds := way.seconds(layers)) is not None]
        if not config.cost_model or full is None or full < WORTH_SECONDS or len(timed) < len(ways):
            return Decision(everything.load, everything.config, self._told(everything, config))
        seconds, best = min(timed, key=lambda one: one[0])
        if seconds > MARGIN * full:
            why = f"ordinary prefill takes {_ms(full)}, blending would take {_ms(seconds)}"
            return Decision((), everything.config, why)
        return Decision(best.load, best.config, self._told(best, config, len(parts)))

    def _choices(self, parts: Sequence[StoredPart]) -> list[tuple[StoredPart, ...]]:
        """All parts, and those without the slowest tier, the two slowest, ...; at least one."""
        tiers = sorted({part.tier for part in parts}, key=self._slowness)
        kept = [set(tiers[:count]) for count in range(len(tiers), 0, -1)]
        return [tuple(part for part in parts if part.tier in some) for some in kept] or [()]

    def _slowness(self, tier: str) -> float:
        speed = self.speeds.of(tier)
        return 0.0 if speed is None else speed.seconds(1 << 20)

    def _loading(self, parts: Sequence[StoredPart]) -> float:
        """Tiers are read side by side, the parts of one tier share its bandwidth."""
        total: dict[str, int] = {}
        for part in parts:
            total[part.tier] = total.get(part.tier, 0) + part.nbytes
        known = ((self.speeds.of(tier), nbytes) for tier, nbytes in total.items())
        return max((speed.seconds(n) for speed, n in known if speed is not None), default=0.0)

    def _guess(self, tokens: int, parts: tuple[StoredPart, ...], config: BlendConfig) -> _Guess:
        loading = self._loading(parts)
        forecast = Forecast(self.costs, *_masks(tokens, parts, config))

        def guess(ratio: float | None) -> _Guess:
            own = config if ratio is None else config.with_ratio(ratio)
            work = forecast.work(plan_schedule(own, len(self.costs)))
            return _Guess(parts, own, loading, self._seconds("blend", work))

        if config.recompute_ratio != AUTO:
            return guess(None)
        low, high = config.ratio_bounds
        least = guess(low)
        if least.computing is None:
            return guess(min(max(PRESET_RATIOS["balanced"], low), high))
        tried = (guess(round(low + (high - low) * step / STEPS, 4)) for step in range(STEPS, 0, -1))
        return next((one for one in tried if (one.computing or 0.0) <= loading), least)

    def _seconds(self, kind: Kind, work: float) -> float | None:
        rate = self.rates.of(kind)
        return None if rate is None else work / rate

    def _told(self, way: _Guess, asked: BlendConfig, parts: int | None = None) -> str | None:
        """Say what was chosen and why, where there was a choice."""
        said = []
        if parts is not None and len(way.load) < parts:
            left = parts - len(way.load)
            said.append(f"{left} of {parts} stored chunks are computed sooner than loaded")
        if asked.recompute_ratio == AUTO:
            ratio = f"ratio {way.config.ratio:g}"
            if way.computing is None:
                said.append(f"{ratio}: nothing is measured yet")
            else:
                took = f"computing {_ms(way.computing)}, loading {_ms(way.loading)}"
                said.append(f"{ratio}: {took}")
        return "; ".join(said) or None


def _masks(tokens: int, parts: Sequence[StoredPart], config: BlendConfig) -> tuple[Mask, Mask]:
    """Return which tokens have cached KV, and which of them may be recomputed."""
    cached, eligible = np.zeros(tokens, dtype=np.bool_), np.zeros(tokens, dtype=np.bool_)
    for part in parts:
        cached[part.start : part.end] = True
        eligible[part.start : part.end] = not (part.protected and config.protect_context)
    return cached, eligible


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:,.0f} ms"
