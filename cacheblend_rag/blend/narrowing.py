"""Sums up what the question's own rows attend to during a pass, to narrow the recomputed rows.

Related: ProphetKV (arXiv 2602.02579) and QCFuse (arXiv 2606.05875) measure the question's attention
in a pass of its own; here the pass computes the question anyway.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from torch import Tensor

from cacheblend_rag.blend.attention import attention_mass
from cacheblend_rag.blend.cost import LayerCost
from cacheblend_rag.blend.observer import Observer
from cacheblend_rag.blend.rows import Rows
from cacheblend_rag.blend.stack import AttentionCall, DecoderStack

LAYERS_BEFORE = 3
"""Layers whose attention is summed up before each narrowing."""
QUESTION_ROWS = 64
"""Most rows whose attention is in memory at once."""


class QuestionAttention(Observer):
    """The attention of the question's rows, in the layers before narrowings.

    question_start: position of the question's first token; the question ends the prompt.
    narrowings: the layers before which rows are narrowed. Of the layers since the last narrowing,
    the last three without a window count; if all have one, the last three. work: floating-point
    operations spent.
    """

    def __init__(self, stack: DecoderStack, question_start: int, narrowings: Iterable[int]) -> None:
        self.work = 0.0
        self._stack, self._question_start = stack, question_start
        self._layers = _watched(stack.costs, sorted(narrowings))
        self._mass: Tensor | None = None

    def attended(self, call: AttentionCall, rows: Rows, keys: Tensor) -> None:
        """Add the attention of the question's rows, over heads and rows."""
        if call.layer not in self._layers:
            return
        begin = int(np.searchsorted(rows.host, self._question_start))
        for start in range(begin, len(rows), QUESTION_ROWS):
            stop = min(start + QUESTION_ROWS, len(rows))
            shares = attention_mass(
                call.query[:, :, start:stop], keys, rows.part(start, stop),
                scaling=call.scaling, window=call.window, softcap=call.softcap, sinks=call.sinks,
            )  # fmt: skip
            mass = shares.sum((0, 1))
            self._mass = mass if self._mass is None else self._mass + mass
            # Query by key once more, and no values: half of what a pair costs.
            per_pair = self._stack.costs[call.layer].per_pair / 2
            self.work += per_pair * (stop - start) * keys.shape[2]

    def take(self) -> Tensor | None:
        """Return what was summed up since the last call, over all ranks' heads: (tokens,) float32.

        None if no row of the question was computed.
        """
        mass, self._mass = self._mass, None
        return None if mass is None else self._stack.all_reduce(mass, "sum")


def _watched(costs: Sequence[LayerCost], narrowings: Sequence[int]) -> frozenset[int]:
    watched: list[int] = []
    for first, layer in zip([0, *narrowings], narrowings, strict=False):
        layers = range(first, layer)
        unlimited = [one for one in layers if costs[one].window is None]
        watched += (unlimited or layers)[-LAYERS_BEFORE:]
    return frozenset(watched)
