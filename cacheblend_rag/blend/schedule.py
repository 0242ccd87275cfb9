"""The schedule of a pass: at which layers rows are chosen, how many, and by which rules."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cacheblend_rag.blend.rows import Positions
from cacheblend_rag.blend.selectors import Selector, make_selector
from cacheblend_rag.blend.selectors.hkvd import HKVD
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.settings import BlendConfig

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Ratios by layer.

    before: ratio applied before layer 0, or None when rows are chosen at check layers.
    checks: check layer -> ratio; empty when ``before`` is set or everything is recomputed.
    """

    selector: Selector
    before: float | None
    checks: dict[int, float]

    @property
    def ratio(self) -> float:
        """Share of chunk tokens recomputed in the end, at most."""
        last = [1.0 if self.before is None else self.before]
        return min([*last, *self.checks.values()])

    @property
    def recomputes_all(self) -> bool:
        return self.before is None and not self.checks

    @property
    def chooses(self) -> bool:
        """Whether a selector ranks tokens at all."""
        return bool(self.before or self.checks)


def plan_schedule(config: BlendConfig, layers: int) -> Schedule:
    """Return a config's schedule for a model of ``layers`` layers.

    Ratio 0 and 1 need no check layer: nothing, or everything, is recomputed from layer 0 on.
    Raises ConfigError when a check layer, or one that a probe observes, is not below ``layers``.
    """
    selector = make_selector(config.selector, config.selector_options)
    ratio = selector.fixed_ratio if selector.fixed_ratio is not None else config.ratio
    if selector.needs_question:
        selector.probe.observed(layers)
    ratios = {layer: config.ratio_at(i) for i, layer in enumerate(config.check_layers)}
    if not selector.needs_fresh_kv:
        ratios = {}
        if ratio in (0, 1):
            return Schedule(selector, None if ratio == 1 else 0.0, {})
    elif all(value == 0 for value in ratios.values()):
        return Schedule(selector, 0.0, {})
    elif all(value == 1 for value in ratios.values()):
        return Schedule(selector, None, {})
    elif max(ratios) >= layers:
        raise ConfigError(
            f"check_layers={config.check_layers} must be below the model's {layers} layers"
        )
    return Schedule(selector, None if ratios else ratio, ratios)


def row_count(ratio: float, tokens: int) -> int:
    """How many of ``tokens`` chunk tokens a ratio recomputes (rounded up)."""
    return min(tokens, math.ceil(ratio * tokens - 1e-9))


def top_rows(scores: Tensor, count: int) -> Tensor:
    """Return the indices (at most count, increasing) of the highest scores; -inf never counts.

    Of equal scores the first ones win, so the choice is the same on every device. The arithmetic is
    NumPy's, on one thread: PyTorch spreads indexing from some thousand elements on over all threads
    of the CPU, and waking them takes longer than the work.
    """
    of = scores.numpy()
    usable = np.flatnonzero(of > -np.inf)
    if count >= usable.size:
        return torch.from_numpy(usable)
    if count <= 0:
        return torch.from_numpy(usable[:0])
    values = of[usable]
    lowest = np.partition(values, -count)[-count]
    taken = values > lowest
    taken[np.flatnonzero(values == lowest)[: count - np.count_nonzero(taken)]] = True
    return torch.from_numpy(usable[taken])


def log_choice(
    request_id: str,
    layer: int | None,
    selector: Selector,
    candidates: Positions,
    scores: Tensor,
    *,
    chosen: Positions,
) -> None:
    """Log a choice, without any token or text.

    layer: where they were chosen, None before layer 0. scores: of the candidates, on the host
    already, so nothing is read back from a device; HKVD's are deviations.
    """
    if not logger.isEnabledFor(logging.DEBUG):
        return
    best = scores.numpy()[np.isin(candidates, chosen, assume_unique=True)]
    kind = "deviation" if isinstance(selector, HKVD) else "score"
    logger.debug(
        "request %s: %s: %d of %d tokens chosen%s",
        request_id or "-",
        "before layer 0" if layer is None else f"layer {layer}",
        len(chosen),
        len(candidates),
        f", {kind} {best.min():.4g} - {best.max():.4g}" if best.size else "",
    )
