"""Decides from sampled divergences whether the recompute ratio steps up or down, or blending stops.

Knows no engine and no model: see ``GuardState``.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from typing import Literal

from cacheblend_rag.prefill.comparing import Comparison
from cacheblend_rag.report import GuardReport
from cacheblend_rag.settings.engine import GuardConfig

Step = Literal["up", "down", "stop"]
Outcome = Comparison | Literal["unknown", "outdated", "dropped"]
"""What came of a sample: divergences, or why there are none, as GuardReport counts it."""

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
    """The state of a guard since it was turned on: samples go in, steps come out.

    Ordinary prefill is the only remedy, so what counts of a sample is its *excess*: how much nearer
    to the reference ordinary prefill is than the blend, both as ``bounded``. If the reference is
    ordinary prefill itself, that is the blend's divergence. If it is nearly never positive, as
    where contextual KV knows documents that the prompt lacks, the ratio is never raised.

    The mean of the latest samples since a step decides: above the limit the ratio steps up, well
    below it, a window after the step at the earliest, down again.

    steps: how many there were. waiting: how many samples wait, or are being compared.
    """

    def __init__(self, config: GuardConfig, own_ratio: float) -> None:
        """own_ratio: of the engine's config; lower ones are no remedy and are left out."""
        self.config = config
        self._ratios = (0.0, *(ratio for ratio in config.ratios if ratio > own_ratio), 1.0)
        self._level = self.steps = self.waiting = 0
        self._patience, self._seen = 1, 0
        self._excess: deque[float] = deque(maxlen=WINDOW)
        self._counts = Counter[str]()
        self._blend = self._prefill = 0.0

    @property
    def is_stopped(self) -> bool:
        """Whether blending has stopped; it stays so."""
        return self._level == len(self._ratios) - 1

    @property
    def ratio(self) -> float:
        """The least recompute ratio now; 0 at first, 1 once stopped."""
        return self._ratios[self._level]

    @property
    def mean(self) -> float:
        """Mean excess of the latest samples since the last step, from -0.25 to 1."""
        return sum(self._excess) / max(1, len(self._excess))

    def take(self, outcome: Outcome) -> Step | None:
        """Take a sample, served at the present level, into account; returns the step that follows.

        Divergences are in nats per token.
        """
        if not isinstance(outcome, Comparison):
            self._counts[outcome] += 1
            return None
        self._counts["compared"] += 1
        self._blend += outcome.blend
        self._prefill += outcome.prefill
        step = self._step(bounded(outcome.blend) - bounded(outcome.prefill))
        if step is not None:
            self._counts[step] += 1
        return step

    def report(self) -> GuardReport:
        """Return the counts, and the divergence."""
        counts = self._counts
        compared = max(1, counts["compared"])
        return GuardReport(
            compared=counts["compared"],
            unknown=counts["unknown"],
            outdated=counts["outdated"],
            dropped=counts["dropped"],
            waiting=self.waiting,
            divergence=self._blend / compared,
            prefill_divergence=self._prefill / compared,
            excess=self.mean,
            ratio=self.ratio,
            stopped=self.is_stopped,
            raised=counts["up"],
            lowered=counts["down"],
        )

    def _step(self, excess: float) -> Step | None:
        if self.is_stopped:
            return None
        self._excess.append(max(LEAST_EXCESS, excess))
        self._seen += 1
        if sum(self._excess) > bounded(self.config.limit) * max(len(self._excess), FEWEST):
            return self._up()
        waited = self._seen >= self._patience * WINDOW
        if self._level and waited and self.mean < bounded(self.config.limit * ENOUGH):
            return self._to(self._level - 1, "down")
        return None

    def _up(self) -> Step:
        if self.steps:  # a lower ratio was not enough: be slower to try it again
            self._patience = min(2 * self._patience, MOST_PATIENCE)
        level = self._level + 1
        return self._to(level, "stop" if level == len(self._ratios) - 1 else "up")

    def _to(self, level: int, step: Step) -> Step:
        self._level, self.steps = level, self.steps + 1
        self._excess.clear()
        self._seen = 0
        return step
