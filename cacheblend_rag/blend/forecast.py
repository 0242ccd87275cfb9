"""What a pass will cost, before it is run: a schedule's rows, counted as if spread evenly."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cacheblend_rag.blend.cost import LayerCost
from cacheblend_rag.blend.rows import Mask
from cacheblend_rag.blend.schedule import Schedule

Shares = NDArray[np.float64]
"""(tokens,): how likely each token is a row."""


def expected_work(
    costs: Sequence[LayerCost],
    cached: Mask,
    eligible: Mask,
    schedule: Schedule,
    *,
    needs_hidden: bool = True,
) -> float:
    """Return the work, in floating-point operations, that BlendPass would count.

    Which rows a selector chooses is not known yet, so each may be chosen alike: how many there are
    is exact, what they attend to is what such rows do on average. A question's probe is not in it.

    Args:
        costs: of each layer.
        cached: (tokens,) bool, tokens that have cached KV.
        eligible: (tokens,) bool, those of them that may be recomputed.
        schedule: which share of these is, from which layer on.
        needs_hidden: whether the last token's hidden state is wanted.
    """
    always = ~cached
    if needs_hidden:
        always[-1] = True
    free = eligible & ~always
    first = 1.0 if schedule.before is None else _share(schedule.before, eligible, free)
    rows, work, last = always + first * free, 0.0, len(costs) - 1
    for layer, cost in enumerate(costs):
        if layer in schedule.checks:
            work += cost.per_row_probe * float(rows.sum())
            rows = always + _share(schedule.checks[layer], eligible, free) * free
        if layer < last:
            work += _run(cost, rows)
        else:
            only_last = needs_hidden and rows.sum() == 1
            work += 0.0 if only_last else cost.per_row_probe * float(rows.sum())
            work += _run(cost, np.eye(1, len(rows), len(rows) - 1)[0]) if needs_hidden else 0
    return work


def _share(ratio: float, eligible: Mask, free: Mask) -> float:
    """Return the share of what may be chosen that a ratio of all eligible tokens is."""
    return float(min(1.0, ratio * eligible.sum() / max(free.sum(), 1)))


def _run(cost: LayerCost, rows: Shares) -> float:
    seen = np.arange(1, len(rows) + 1)
    if cost.window is not None:
        seen = np.minimum(seen, cost.window)
    return float(cost.per_row * rows.sum() + cost.per_pair * (rows * seen).sum())
