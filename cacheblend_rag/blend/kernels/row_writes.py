"""Writes rows' fresh KV into a layer whose address is read on the device; see ``KVAddress``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from cacheblend_rag.blend.kernels.scattered import KVAddress

ROWS = 16
"""Rows of one head that a program writes."""


def write_rows(keys: Tensor, values: Tensor, positions: Tensor, place: KVAddress) -> None:
    """Write KV, (1, kv_heads, rows, head_dim) each, to ``positions`` of a layer.

    positions: (rows,) int64 on the device; a row at -1 is written nowhere. The layer holds as many
    heads, of the same width and dtype.
    """
    _, heads, rows, width = keys.shape
    keys, values = (one if one.stride(3) == 1 else one.contiguous() for one in (keys, values))
    with torch.cuda.device_of(keys):  # type: ignore[no-untyped-call]
        _write[(triton.cdiv(rows, ROWS), heads)](
            keys, values, positions, place.numbers, place.layer, rows,
            keys.stride(1), keys.stride(2), values.stride(1), values.stride(2),
            D=width, PADDED=triton.next_power_of_2(width), N=ROWS,
        )  # fmt: skip


@triton.jit(do_not_specialize=["layer", "rows"])
def _write(
    keys: tl.tensor, values: tl.tensor, positions: tl.tensor, place: tl.tensor, layer: tl.tensor,
    rows: tl.tensor, k_head: tl.tensor, k_row: tl.tensor, v_head: tl.tensor, v_row: tl.tensor,
    D: tl.constexpr, PADDED: tl.constexpr, N: tl.constexpr,
) -> None:  # fmt: skip
    """Write the keys and values of N rows of one KV head."""
    TYPE: tl.constexpr = keys.dtype.element_ty
    row, head = tl.program_id(0) * N + tl.arange(0, N), tl.program_id(1).to(tl.int64)
    d = tl.arange(0, PADDED)
    position = tl.load(positions + row, mask=row < rows, other=-1).to(tl.int64)
    wanted = (position >= 0)[:, None] & (d < D)[None, :]
    row = row.to(tl.int64)
    k = tl.load(keys + head * k_head + row[:, None] * k_row + d[None, :], mask=wanted)
    v = tl.load(values + head * v_head + row[:, None] * v_row + d[None, :], mask=wanted)
    start = tl.multiple_of(tl.load(place + 2), 16) * layer
    start += tl.multiple_of(tl.load(place + 3), 16) * head
    here = start + position[:, None] * D + d[None, :]
    into_keys = tl.multiple_of(tl.load(place).to(tl.pointer_type(TYPE)), 16)
    into_values = tl.multiple_of(tl.load(place + 1).to(tl.pointer_type(TYPE)), 16)
    tl.store(into_keys + here, k, mask=wanted)
    tl.store(into_values + here, v, mask=wanted)
