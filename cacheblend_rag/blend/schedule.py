"""The schedule of a pass: at which layers rows are chosen, and how many."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from cacheblend_rag.blend.rows import Positions
from cacheblend_rag.blend.selectors import Question, Selector, make_selector
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.settings import BlendConfig


@dataclass(frozen=True, slots=True)
class Schedule:
    """Shares of the chunk tokens that may be recomputed.

    before: chosen before layer 0; 1 when they are chosen at check layers, or all are recomputed.
    checks: check layer -> share chosen there.
    """

    selector: Selector
    before: float
    checks: Mapping[int, float] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        """Share recomputed in the end, at most."""
        return min([self.before, *self.checks.values()])

    def probed(self, layers: int) -> int:
        """Return how many of a model's layers a probe of the question runs through; 0 if none."""
        if isinstance(self.selector, Question) and 0 < self.ratio < 1:
            return self.selector.observed(layers)[-1] + 1
        return 0


REUSE_ONLY = Schedule(make_selector("none"), 0.0)
"""The schedule of a pass that recomputes nothing."""


def plan_schedule(config: BlendConfig, layers: int) -> Schedule:
    """Return a config's schedule for a model of ``layers`` layers.

    Ratio 0 and 1 need no check layer: nothing, or everything, is recomputed from layer 0 on.
    Raises ConfigError when a check layer, or one that a probe observes, is not below ``layers``.
    """
    selector = make_selector(config.selector, config.selector_options)
    if isinstance(selector, Question):
        selector.observed(layers)  # which checks them
    if not selector.needs_fresh_kv:
        fixed = selector.fixed_ratio
        return Schedule(selector, config.ratio if fixed is None else fixed)
    checks = {layer: config.ratio_at(i) for i, layer in enumerate(config.check_layers)}
    if set(checks.values()) in ({0}, {1}):
        return Schedule(selector, config.ratio)
    if max(checks) >= layers:
        raise ConfigError(
            f"check_layers={config.check_layers} must be below the model's {layers} layers"
        )
    return Schedule(selector, 1.0, checks)


def row_count(ratio: float, tokens: int) -> int:
    """How many of ``tokens`` chunk tokens a ratio recomputes (rounded up)."""
    return min(tokens, math.ceil(ratio * tokens - 1e-9))


def top_rows(scores: Tensor, count: int) -> Positions:
    """Return the indices (at most count, rising) of the highest scores; -inf never counts.

    Of equal scores the first ones win, so the choice is the same on every device. The arithmetic is
    NumPy's, on one thread: PyTorch spreads indexing from some thousand elements on over all threads
    of the CPU, and waking them takes longer than the work.
    """
    of = scores.numpy()
    best = np.argsort(-of, kind="stable")[:count]
    return np.sort(best[of[best] > -np.inf])
