"""Decides what of a prompt is reused: by its stored tokens, then by measured speeds.

A pass computes while chunk KV is being loaded. So a blended prefill takes as long as loading or
computing, whichever is longer. Every time is estimated from the median of the latest measurements,
which expire, so that what was rejected is measured again. Source: the loading controller of
CacheBlend (arXiv 2405.16444, section 5); here with measured speeds, a decision for each tier, and
ordinary prefill if no chunk is worth loading.

Recomputed KV of a contextual chunk forgets what the chunk's own document says, if the prompt lacks
it. The prior, how much the document changed a token's key, says which tokens hold that knowledge:
usually few, and none where the document hardly changed any key. Source: this project.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from cacheblend_rag.blend.cost import Forecast, LayerCost, prefill_cost
from cacheblend_rag.blend.rows import Mask
from cacheblend_rag.blend.schedule import plan_schedule
from cacheblend_rag.kv.timings import Estimate, Speeds
from cacheblend_rag.reason import Miss, Reason, ReasonCode
from cacheblend_rag.report import ChunkReport
from cacheblend_rag.settings import BlendConfig

NO_CHUNK = Reason(ReasonCode.NO_CHUNK, "no known chunk in the prompt")
NOT_STORED = Reason(ReasonCode.NOT_STORED, "no chunk of the prompt is stored")
UNREADABLE = Reason(ReasonCode.UNREADABLE, "no stored chunk could be read")
ABSENT = (ReasonCode.NOT_STORED, ReasonCode.OTHER_MODEL)
"""Codes of misses of chunks whose KV is not there, whatever state the store is in."""
LEAST_SHARE = 1 / 8
"""Smallest share of a prompt that exact KV must have to be reused by itself: below it, the overhead
of a blend pass may exceed the computation saved."""


class Part(Protocol):
    """Tokens [start, end) of a prompt whose KV can be reused; see PlacedChunk."""

    @property
    def tokens(self) -> int: ...
    @property
    def is_exact(self) -> bool: ...


def config_for(config: BlendConfig, parts: Sequence[Part], tokens: int) -> BlendConfig:
    """Return a request's config, without ``min_tokens`` if all that can be reused is exact.

    It must be enough to be worth a pass all the same, as a stored prefix must. parts: what can be
    reused. tokens: of the whole prompt.
    """
    held = sum(part.tokens for part in parts)
    is_exact = bool(parts) and all(part.is_exact for part in parts)
    is_enough = held >= max(1, LEAST_SHARE * tokens)
    return config.with_changes(min_tokens=0) if is_exact and is_enough else config


def refusal(found: Sequence[ChunkReport], least: int) -> tuple[Reason, list[ChunkReport]] | None:
    """Decide by the found chunks of a prompt, before any layer is read.

    found: reports as if all found chunks were used. least: ``min_tokens``. Returns why the prompt
    is not blended, and the reports of its chunks; None if it is blended.
    """
    refused = too_little(sum(chunk.tokens for chunk in found if chunk.hit), least)
    if refused is None:
        return None
    reason, miss = refused
    if miss is None and any(chunk.reason_code not in ABSENT for chunk in found):
        reason = UNREADABLE
    return reason, missed(found, miss) if miss else list(found)


def missed(found: Sequence[ChunkReport], reason: Reason) -> list[ChunkReport]:
    """Report the found chunks as missed for ``reason``, the others unchanged."""
    return [
        replace(chunk, hit=False, reason=reason, tier=None) if chunk.hit else chunk
        for chunk in found
    ]


def too_little(reusable: int, least: int) -> tuple[Reason, Reason | None] | None:
    """Return why so few tokens are not worth blending, and the miss reason of their chunks.

    reusable: tokens of chunks that are stored. least: ``min_tokens``. None if blending is worth it;
    without a miss reason the store gives it.
    """
    if reusable == 0:
        return NOT_STORED, None
    if reusable < least:
        why = f"{reusable} reusable tokens are fewer than min_tokens={least}"
        return Reason(ReasonCode.TOO_SHORT, why), Miss.TOO_SHORT
    return None


# Which tokens of a chunk stay as stored

LEAST_CHANGE = 0.25
"""The smallest prior of a protected token: below it, KV hardly depends on the document.

Measured on fragments: on a model of 1.1M parameters, which looks subjects up in its first
layers, nearly all priors are above it, and recomputed chunks forget their subject; on SmolLM2 and
Gemma 3 all are below it, and recomputing any of their tokens brings predictions nearer to those
after the whole documents.
"""


def protected_tokens(prior: Tensor, share: float) -> Tensor:
    """Return (tokens,) bool: of the fewest tokens that hold ``share`` of a chunk's prior, those
    with a prior of at least LEAST_CHANGE.

    prior: (tokens,) float32, at least 0, on the host. share: 0 gives no token, 1 every token,
    whatever its prior. Of equal priors the first tokens are taken.
    """
    if share >= 1:
        return torch.ones_like(prior, dtype=torch.bool)
    of = prior.numpy().astype(np.float64)
    order = np.argsort(-of, kind="stable")
    ordered = of[order]
    before = ordered.cumsum() - ordered
    taken = np.zeros(of.shape, dtype=np.bool_)
    taken[order] = before < share * ordered.sum()
    return torch.from_numpy(taken) & (prior >= LEAST_CHANGE)


def free_tokens(tokens: int, prior: Tensor | None, share: float) -> Mask:
    """Return (tokens,) bool: which tokens of such a chunk may be recomputed.

    prior: as stored; without one nothing is known, so none may, unless nothing is protected.
    share: see ``protected_tokens``.
    """
    if prior is None:
        return np.full(tokens, share == 0)
    free: Mask = (~protected_tokens(prior, share)).numpy()
    return free


# What is worth loading

MARGIN = 1.1
"""A way to prefill is rejected if its estimate is this many times slower than another's."""
KEEP_SECONDS = 120.0
"""Age at which measurements of passes and of ordinary prefill expire."""


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

    load: which of its stored parts to load. why: in one line, None if there was no choice.
    """

    load: tuple[StoredPart, ...]
    why: Reason | None = None


@dataclass(frozen=True, slots=True)
class _Guess:
    """The estimated seconds of one way. computing: None if unknown."""

    load: tuple[StoredPart, ...]
    loading: float
    computing: float | None

    def seconds(self, layers: int) -> float | None:
        """Return the total time: the first layer is waited for, the others overlap."""
        if self.computing is None:
            return None
        return max(self.loading, self.computing) + self.loading / layers


@dataclass(frozen=True)
class Controller:
    """Decides for one model and store.

    costs: of each of its layers. clock: in seconds; it may stop while a pass waits for others.
    """

    costs: tuple[LayerCost, ...]
    rates: Rates
    speeds: Speeds
    clock: Callable[[], float] = time.perf_counter

    def learn(self, work: float, seconds: float, read: Mapping[str, tuple[int, float]]) -> None:
        """Record a pass: its floating-point operations and seconds; bytes and seconds by tier."""
        self.rates.record("blend", work, seconds)
        for tier, (nbytes, spent) in read.items():
            self.speeds.record(tier, nbytes, spent)

    def decide(
        self, tokens: int, parts: Sequence[StoredPart], config: BlendConfig, *, held: int = 0
    ) -> Decision:
        """Choose what to load of a prompt of so many tokens.

        A way that was not measured often enough is tried, which measures it; ordinary prefill then
        counts as no slower than a pass is for the same work. parts: at least one.
        held: so many first tokens are computed by no way, nor by ordinary prefill, since their KV
        is there.
        """
        ways = [self._guess(tokens, load, config, held) for load in self._choices(parts)]
        spans = [way.seconds(len(self.costs)) for way in ways]
        everything, known = ways[0], [span for span in spans if span is not None]
        work = prefill_cost(self.costs, tokens) - prefill_cost(self.costs, held)
        full = _seconds(self.rates.of("prefill"), work) or _seconds(self.rates.of("blend"), work)
        if not config.cost_model or full is None or len(known) < len(ways):
            return Decision(everything.load)
        quickest = min(known)
        spent = known[0] if known[0] <= MARGIN * quickest else quickest
        if spent <= MARGIN * full:
            best = ways[known.index(spent)]
            return Decision(best.load, _left_out(best, parts))
        took = f"ordinary prefill takes {_ms(full)}, blending would take {_ms(spent)}"
        return Decision((), Reason(ReasonCode.SLOW, took))

    def _choices(self, parts: Sequence[StoredPart]) -> list[tuple[StoredPart, ...]]:
        """Return all parts, then those without the slowest tier, the two slowest, ..."""
        tiers = sorted({part.tier for part in parts}, key=self._slowness)
        kept = [set(tiers[:count]) for count in range(len(tiers), 0, -1)]
        return [tuple(part for part in parts if part.tier in some) for some in kept]

    def _slowness(self, tier: str) -> float:
        return _seconds(self.speeds.of(tier), 1 << 20) or 0.0

    def _loading(self, parts: Sequence[StoredPart]) -> float:
        """Return the loading time: tiers are read at once, parts of one share its bandwidth."""
        total = Counter[str]()
        for part in parts:
            total[part.tier] += part.nbytes
        times = [_seconds(self.speeds.of(tier), nbytes) for tier, nbytes in total.items()]
        return max((read for read in times if read is not None), default=0.0)

    def _guess(
        self, tokens: int, parts: tuple[StoredPart, ...], config: BlendConfig, held: int
    ) -> _Guess:
        forecast = Forecast(self.costs, *masks_of(tokens, parts, held))
        work = forecast.work(plan_schedule(config, len(self.costs)))
        return _Guess(parts, self._loading(parts), _seconds(self.rates.of("blend"), work))


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


def _seconds(estimate: Estimate | None, units: float) -> float | None:
    """Return the estimated seconds of so much work; None with too few measurements."""
    return estimate.seconds(units) if estimate is not None and estimate.is_known else None


def _left_out(way: _Guess, parts: Sequence[StoredPart]) -> Reason | None:
    """Return why some chunks are not loaded; None if all are."""
    chunks = sum(part.is_chunk for part in parts)
    left = chunks - sum(part.is_chunk for part in way.load)
    sooner = f"{left} of {chunks} stored chunks are computed sooner than loaded"
    return Reason(ReasonCode.SOME_SLOW, sooner) if left else None


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:,.0f} ms"
