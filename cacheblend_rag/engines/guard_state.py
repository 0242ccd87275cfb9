"""Decides from sampled divergences whether the recompute ratio steps up or down, or blending stops.

Knows no engine and no model: see ``GuardState``.
"""

from __future__ import annotations

import math
from typing import Literal

from cacheblend_rag.engines.guard_bound import DriftingMean, samples_to_notice
from cacheblend_rag.settings.guard import GuardConfig

Step = Literal["up", "down", "stop"]

LEAST_EXCESS = -0.25
"""A sample whose blend is nearer than ordinary prefill counts at most so much; it bounds what one
sample can hide."""
DRIFT = 1.5
"""The divergence, in limits, for which ``reacts_within`` is stated."""
GRID = 100
"""Parts of the range of excesses between which bounds are reported."""
MOST_PATIENCE = 64
"""Most windows between a step and a step down."""


def bounded(divergence: float) -> float:
    """Return a divergence in nats as a number from 0 to 1, so that no sample outweighs all."""
    return -math.expm1(-max(0.0, divergence))


class GuardState:
    """The state of a guard: samples go in, steps come out.

    Ordinary prefill is the only remedy, so what counts of a sample is its *excess*: how much nearer
    to the reference ordinary prefill is than the blend, both as ``bounded``. If the reference is
    ordinary prefill itself, that is the blend's divergence. If it is nearly never positive, as
    where contextual KV knows documents that the prompt lacks, the ratio is never raised.

    level: how many ratios were tried so far, 0 at first. After the k-th step, the error is divided
    by (k + 1)(k + 2), so that ``error`` holds for all of them together.
    """

    def __init__(self, config: GuardConfig, own_ratio: float) -> None:
        """own_ratio: of the engine's config; lower ones are no remedy and are left out."""
        self.config = config
        self.ratios = tuple(ratio for ratio in config.ratios if ratio > own_ratio)
        self.limit = bounded(config.limit)
        self._enough = bounded(config.limit * config.keep)
        self.level, self.steps, self._patience = 0, 0, 1
        self._excess = self._anew()

    @property
    def is_stopped(self) -> bool:
        """Whether blending has stopped; it stays so."""
        return self.level > len(self.ratios)

    @property
    def ratio(self) -> float:
        """The least recompute ratio now; 0 at first, 1 once stopped."""
        levels = (0.0, *self.ratios, 1.0)
        return levels[self.level]

    @property
    def mean(self) -> float:
        """Mean excess of the latest samples, from -1 to 1."""
        return self._excess.mean

    @property
    def bounds(self) -> tuple[float, float]:
        """Bounds of the mean excess since the last step, from -0.25 to 1."""
        return self._excess.bounds

    @property
    def reacts_within(self) -> int:
        """Samples within which an excess of 1.5 limits, and a spread as large, is noticed."""
        mean = bounded(DRIFT * self.config.limit)
        return samples_to_notice(
            mean,
            self.limit,
            spread=mean,
            error=self._error,
            window=self.config.window,
            seen=self._excess.count,
        )

    def observe(self, blend: float, prefill: float = 0.0) -> Step | None:
        """Take a sample into account; returns the step that follows from it.

        blend, prefill: divergences from the reference, of the blend and of ordinary prefill, in
        nats per token; both of requests that were served at the present level.
        """
        if self.is_stopped:
            return None
        self._excess.observe(max(LEAST_EXCESS, bounded(blend) - bounded(prefill)))
        if bool(self._excess.is_above(self.limit)):
            return self._up()
        waited = self._excess.count >= self._patience * self.config.window
        if self.level and waited and bool(self._excess.is_below(self._enough)):
            return self._to(self.level - 1, "down")
        return None

    def _up(self) -> Step:
        if self.steps:  # a lower ratio was not enough: be slower to try it again
            self._patience = min(2 * self._patience, MOST_PATIENCE)
        return self._to(self.level + 1, "stop" if self.level == len(self.ratios) else "up")

    def _to(self, level: int, step: Step) -> Step:
        self.level, self.steps = level, self.steps + 1
        self._excess = self._anew()
        return step

    @property
    def _error(self) -> float:
        return self.config.error / ((self.steps + 1) * (self.steps + 2))

    def _anew(self) -> DriftingMean:
        return DriftingMean(
            error=self._error,
            window=self.config.window,
            told=(self.limit, self._enough),
            low=LEAST_EXCESS,
            high=1.0,
            grid=GRID,
        )
