"""Observes a blend pass and builds its trace."""

from __future__ import annotations

import torch
from torch import Tensor

from cacheblend_rag.blend.observer import Observer, Selection
from cacheblend_rag.blend.rows import Mask, Rows
from cacheblend_rag.blend.schedule import top_rows
from cacheblend_rag.trace import MOST_LAYERS, MOST_SELECTIONS, MOST_TOKENS, Trace, TracedSelection


class TraceRecorder(Observer):
    """Records the choices of a pass over one prompt.

    cached: (tokens,) bool, which have cached KV. It copies scores and deviations back from the
    device at each choice.
    """

    def __init__(self, cached: Mask) -> None:
        self._cached = cached
        self._selections: list[TracedSelection] = []
        self._rows: list[int] = []
        self._truncated = False

    def computed(self, layer: int, rows: Rows) -> None:
        """Count the rows of a layer that had cached KV."""
        if layer >= MOST_LAYERS:
            self._truncated = True
            return
        self._rows.append(int(self._cached[rows.host].sum()))

    def selected(self, selection: Selection) -> None:
        """Record a selection; of a long one, only the tokens with the highest scores."""
        if len(self._selections) == MOST_SELECTIONS:
            self._truncated = True
            return
        scores = selection.scores
        kept = torch.nonzero(scores.isfinite())[:, 0]
        if kept.numel() > MOST_TOKENS:
            kept, self._truncated = kept[top_rows(scores[kept], MOST_TOKENS)], True
        positions = selection.positions[kept.numpy()].tolist()
        chosen = set(selection.chosen.tolist())
        self._selections.append(
            TracedSelection(
                layer=selection.layer,
                positions=tuple(positions),
                scores=_numbers(scores, kept),
                chosen=tuple(position in chosen for position in positions),
                key_deviations=_numbers(selection.key_deviations, kept),
                value_deviations=_numbers(selection.value_deviations, kept),
            )
        )

    def trace(self) -> Trace:
        """Return the trace."""
        return Trace(tuple(self._selections), tuple(self._rows), self._truncated)


def _numbers(values: Tensor | None, kept: Tensor) -> tuple[float, ...]:
    """Return values as plain numbers; NaN and infinity (an overflow) become the largest number."""
    if values is None:
        return ()
    most = torch.finfo(torch.float32).max
    return tuple(values.float().cpu()[kept].nan_to_num(most, most, -most).tolist())
