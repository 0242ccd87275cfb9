"""Launches of ``place_kernel`` for chunks of which all layers are in memory, prepared for a pass.

One table has the addresses of every layer. Triton works out once what it launches with, which takes
longer than the launch itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from cacheblend_rag.blend.fused import FusedKV
from cacheblend_rag.blend.kernels.placement import (
    LINK_PROGRAMS,
    PROGRAMS,
    Launch,
    arguments_of,
    by_form,
    grid_of,
    launches_of,
    place_kernel,
)
from cacheblend_rag.blend.layer_part import WholePart
from cacheblend_rag.kv.packed_kv import PackedKV

ALIGNED = 16
"""Pointer alignment in bytes that Triton specializes on: other pointers need another kernel."""


def tables_of(parts: Sequence[WholePart]) -> tuple[NDArray[np.int64], list[Launch]]:
    """Return the tables of all layers, (layers, chunks, COLUMNS), and the launches of each layer.

    See ``table_of``; a launch's rows are those of its layer.
    """
    ordered = [parts[index] for index in by_form([part.kv for part in parts])]
    rows, launches = launches_of([part.first for part in ordered])
    apart = [_apart(part) for part in ordered]
    layers = np.arange(ordered[0].kv.shape[0], dtype=np.int64)[:, None, None]
    table = np.array(rows, dtype=np.int64) + layers * np.array(apart, dtype=np.int64)
    aligned = [
        replace(one, align=math.gcd(one.align, *(n for row in apart[one.rows] for n in row[:2])))
        for one in launches
    ]
    return table, aligned


def _apart(part: WholePart) -> list[int]:
    """Return how far a chunk's numbers in the table of a layer are from those of the one before."""
    kv, turn = part.kv, part.first.turn
    if isinstance(kv, PackedKV):
        codes, scales = kv.codes.stride(0), kv.exponents.stride(0)
        own = [codes, codes, 0, 0, scales, 0, scales, 0]
    else:
        own = [tensor.stride(0) * tensor.itemsize for tensor in (kv.keys, kv.values)] + [0] * 6
    moves = [0, 0]
    if turn is not None and turn.cos.shape[-1]:
        moves = [tensor.stride(0) * tensor.itemsize for tensor in (turn.cos, turn.sin)]
    return [*own, *moves, 0, 0]


class LayerLaunches:
    """Places one layer of chunks after the other into a buffer, on the current stream.

    fused: the buffer. table, launches: what ``tables_of`` returned, the table on the device.
    on_host: whether any chunk is in the host's memory.
    """

    def __init__(
        self, fused: FusedKV, table: Tensor, launches: Sequence[Launch], *, on_host: bool
    ) -> None:
        self._fused, self._rows = fused, table.shape[1]
        self._table = table.view(-1, table.shape[2])
        programs = LINK_PROGRAMS if on_host else PROGRAMS
        heads = fused.keys.shape[1]
        self._launches = [(one, grid_of(one, heads, programs)) for one in launches]
        self._ready: dict[tuple[int, bool, bool], tuple[Any, tuple[Any, ...]]] = {}

    def __call__(self, layer: int) -> None:
        """Launch the kernel that copies one layer of all chunks into the buffer."""
        keys, values = self._fused.of_layer(layer)
        into = keys.data_ptr(), values.data_ptr()
        aligned = not into[0] % ALIGNED, not into[1] % ALIGNED
        first = layer * self._rows
        for index, (launch, grid) in enumerate(self._launches):
            row = first + launch.rows.start
            ready = self._ready.get((index, *aligned))
            if ready is not None:
                launched, (table, apart, tail) = ready
                launched(table, *into, apart, row, *tail)
                continue
            own = replace(launch, rows=slice(row, first + launch.rows.stop))
            given = arguments_of(own, keys, values, self._table)
            compiled = place_kernel[grid](*given)
            if compiled is not None:  # by Triton's interpreter nothing is compiled
                ready = compiled[grid], (self._table.data_ptr(), given[3], given[5:])
                self._ready[index, *aligned] = ready
