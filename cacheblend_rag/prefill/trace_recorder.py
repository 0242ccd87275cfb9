"""Observes a blend pass and builds its trace."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from cacheblend_rag.blend.fused import FusedKV
from cacheblend_rag.blend.observer import Observer, Selection
from cacheblend_rag.blend.passes import Candidates
from cacheblend_rag.blend.rows import Mask, Positions, Rows
from cacheblend_rag.blend.schedule import Schedule, top_rows
from cacheblend_rag.blend.selectors.base import squared_deviation
from cacheblend_rag.blend.stack import AttentionCall, DecoderStack
from cacheblend_rag.trace import (
    MOST_LAYERS,
    MOST_SELECTIONS,
    MOST_TOKENS,
    Deviations,
    Trace,
    TracedLayer,
    TracedSelection,
    TracedTokens,
)

ROWS_AT_ONCE = 4096
"""Rows whose KV is compared in one operation: bounds the size of temporary tensors."""

Measured = NDArray[np.float32]


class TraceRecorder(Observer):
    """Records one pass over one prompt.

    candidates: of the pass, for the whole prompt. schedule: of the pass. in_chunks: (tokens,) bool,
    the tokens of used chunks. Scores are read back from the device at each choice, all else by
    ``trace()``, which all ranks of a finished pass must call.
    """

    def __init__(
        self, stack: DecoderStack, candidates: Candidates, schedule: Schedule, in_chunks: Mask
    ) -> None:
        self._stack, self._cached = stack, in_chunks
        self._protected = np.flatnonzero(self._cached & ~candidates.eligible.numpy())
        # Without a check layer from layer 1 on, the first whose values depend on other tokens.
        self._sampled = min(schedule.checks, default=1)
        self._selections: list[TracedSelection] = []
        layers = stack.geometry.layers
        self._rows = [0] * min(layers, MOST_LAYERS)
        self._truncated = layers > MOST_LAYERS
        self._index: dict[Rows, tuple[Tensor, Rows]] = {}
        self._changed: dict[int, list[tuple[Positions, Tensor]]] = defaultdict(list)

    def watches(self, layer: int) -> bool:
        return True

    def replacing(self, call: AttentionCall, rows: Rows, fused: FusedKV) -> None:
        """Count the rows that have cached KV, and compare their fresh KV with it."""
        layer = call.layer
        if layer >= MOST_LAYERS:
            return
        index, cached = self._with_cached_kv(rows)
        self._rows[layer] += len(cached)
        for start in range(0, len(cached), ROWS_AT_ONCE):
            part = slice(start, start + ROWS_AT_ONCE)
            fresh = [kv[0].index_select(1, index[part]) for kv in (call.key, call.value)]
            stored = [kv.index_select(1, cached.device[part]) for kv in fused.of_layer(layer)]
            changes = [squared_deviation(*pair) for pair in zip(fresh, stored, strict=True)]
            sizes = [kv.float().square_().sum((0, 2)) for kv in fresh]
            self._changed[layer].append((cached.host[part], torch.stack((*changes, *sizes))))

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
        keys = values = None
        if selection.evidence.fresh is not None:
            keys, values = (selection.evidence.deviation(of) for of in ("k", "v"))
        chosen = set(selection.chosen.tolist())
        self._selections.append(
            TracedSelection(
                layer=selection.layer,
                positions=tuple(positions),
                scores=_numbers(scores, kept),
                chosen=tuple(position in chosen for position in positions),
                key_deviations=_numbers(keys, kept),
                value_deviations=_numbers(values, kept),
            )
        )

    def trace(self) -> Trace:
        """Return the trace of a finished pass; collective."""
        changed = {layer: self._whole(parts) for layer, parts in sorted(self._changed.items())}
        protected = self._protected.tolist()
        sampled = min((layer for layer in changed if layer >= self._sampled), default=None)
        tokens = None if sampled is None else self._sample(sampled, *changed[sampled])
        self._truncated |= len(protected) > MOST_TOKENS
        return Trace(
            selections=tuple(self._selections),
            rows=tuple(self._rows),
            truncated=self._truncated,
            layers=tuple(_layer(layer, *found) for layer, found in changed.items()),
            tokens=tokens,
            protected=tuple(protected[:MOST_TOKENS]),
        )

    def _with_cached_kv(self, rows: Rows) -> tuple[Tensor, Rows]:
        """Return the indices of the rows that have cached KV, and these rows."""
        if rows not in self._index:
            found = np.flatnonzero(self._cached[rows.host])
            device = self._stack.geometry.device
            index = torch.from_numpy(found).to(device, non_blocking=True)
            self._index[rows] = index, Rows.at(rows.host[found], device)
        return self._index[rows]

    def _whole(self, parts: Sequence[tuple[Positions, Tensor]]) -> tuple[Positions, Measured]:
        """Return a layer's positions, and four numbers each, of all ranks' heads."""
        positions, numbers = zip(*parts, strict=True)
        whole = self._stack.all_reduce(torch.cat(numbers, 1), "sum").cpu()
        most = torch.finfo(torch.float32).max
        return np.concatenate(positions), whole.nan_to_num(most, most, 0).numpy()

    def _sample(self, layer: int, positions: Positions, numbers: Measured) -> TracedTokens:
        keys, values, *_ = numbers
        if len(positions) > MOST_TOKENS:
            best = np.sort(np.argsort(-values, kind="stable")[:MOST_TOKENS])
            positions, keys, values, self._truncated = (
                positions[best], keys[best], values[best], True
            )  # fmt: skip
        return TracedTokens(
            layer, tuple(positions.tolist()), tuple(keys.tolist()), tuple(values.tolist())
        )


def _layer(layer: int, positions: Positions, numbers: Measured) -> TracedLayer:
    """numbers: (4, tokens), deviations of keys and of values, and sizes of both."""
    keys, values, key_sizes, value_sizes = numbers.astype(np.float64)
    return TracedLayer(
        layer, len(positions), _deviations(keys, key_sizes), _deviations(values, value_sizes)
    )


def _deviations(found: NDArray[np.float64], sizes: NDArray[np.float64]) -> Deviations:
    return Deviations(
        mean=float(found.mean()),
        median=float(np.median(found)),
        most=float(found.max()),
        size=float(sizes.mean()),
    )


def _numbers(values: Tensor | None, kept: Tensor) -> tuple[float, ...]:
    """Return values as plain numbers; NaN and infinity (an overflow) become the largest number."""
    if values is None:
        return ()
    most = torch.finfo(torch.float32).max
    return tuple(values.float().cpu()[kept].nan_to_num(most, most, -most).tolist())
