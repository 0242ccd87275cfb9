"""Decides from sampled divergences whether the recompute ratio steps up or down, or blending stops.

Knows no engine and no model: see ``GuardState``.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Literal

from cacheblend_rag.settings.engine import GuardConfig

Step = Literal["up", "down", "stop"]

WINDOW = 512
"""The mean is of so many latest samples; after a step, the ratio steps down no sooner."""
FEWEST = WINDOW // 4
"""The sum of excesses is divided by at least so many samples, so that a few cannot decide."""
ENOUGH = 0.5
"""The ratio steps down when the mean is below this share of the limit."""
LEAST_EXCESS = -0.25
"""A sample whose blend is nearer than ordinary prefill counts at most so much; it bounds what one
sample can hide."""
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

    The mean of the latest samples since a step decides: above the limit the ratio steps up, well
    below it, a window after the step at the earliest, down again.

    level: how many ratios were tried so far, 0 at first.
    """

    def __init__(self, config: GuardConfig, own_ratio: float) -> None:
        """own_ratio: of the engine's config; lower ones are no remedy and are left out."""
        self.config = config
        self.ratios = tuple(ratio for ratio in config.ratios if ratio > own_ratio)
        self.limit = bounded(config.limit)
        self._enough = bounded(config.limit * ENOUGH)
        self.level, self.steps, self._patience = 0, 0, 1
        self._excess: deque[float] = deque(maxlen=WINDOW)
        self._seen = 0

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
        """Mean excess of the latest samples since the last step, from -0.25 to 1."""
        return sum(self._excess) / max(1, len(self._excess))

    def observe(self, blend: float, prefill: float = 0.0) -> Step | None:
        """Take a sample into account; returns the step that follows from it.

        blend, prefill: divergences from the reference, of the blend and of ordinary prefill, in
        nats per token; both of requests that were served at the present level.
        """
        if self.is_stopped:
            return None
        self._excess.append(max(LEAST_EXCESS, bounded(blend) - bounded(prefill)))
        self._seen += 1
        if sum(self._excess) > self.limit * max(len(self._excess), FEWEST):
            return self._up()
        waited = self._seen >= self._patience * WINDOW
        if self.level and waited and self.mean < self._enough:
            return self._to(self.level - 1, "down")
        return None

    def _up(self) -> Step:
        if self.steps:  # a lower ratio was not enough: be slower to try it again
            self._patience = min(2 * self._patience, MOST_PATIENCE)
        return self._to(self.level + 1, "stop" if self.level == len(self.ratios) else "up")

    def _to(self, level: int, step: Step) -> Step:
        self.level, self.steps = level, self.steps + 1
        self._excess.clear()
        self._seen = 0
        return step
