"""TraceRecorder: observes a blend pass and makes its trace."""

from __future__ import annotations

import torch
from torch import Tensor

from cacheblend_rag.blend.observer import Observer, Selection
from cacheblend_rag.blend.rows import Mask, Rows
from cacheblend_rag.blend.schedule import top_rows
from cacheblend_rag.trace import MOST_LAYERS, MOST_SELECTIONS, MOST_TOKENS, Trace, TracedSelection


class TraceRecorder(Observer):
    """Keeps what a pass over one prompt chooses; cached: (tokens,) bool, which have cached KV.

    It reads scores and deviations back from the device as they are made.
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
        """Keep a selection, or of a long one the tokens with the highest scores."""
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
        """Return what was kept."""
        return Trace(tuple(self._selections), tuple(self._rows), self._truncated)


def _numbers(values: Tensor | None, kept: Tensor) -> tuple[float, ...]:
    """Return some values as plain numbers; what is none (an overflow) as the largest there is."""
    if values is None:
        return ()
    most = torch.finfo(torch.float32).max
    return tuple(values.float().cpu()[kept].nan_to_num(most, most, -most).tolist())
