"""Attention of scattered rows by one Triton kernel; its PyTorch twin is `attend_rows`.

No mask lies in memory: the kernel compares positions. A program computes a tile of rows for all
heads that share a KV head, so their KV is read once, and reads the keys from the first that its
first row may see to its last row. Keys that all rows of a tile see are not compared at all. The
algorithm is FlashAttention's (Source: arXiv 2205.14135).

It runs on NVIDIA GPUs from compute capability 8.0 on, and in Triton's interpreter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cacheblend_rag.blend.stack import AttentionCall

LEAST_WIDTH, MOST_WIDTH = 64, 256
LOG2E = math.log2(math.e)
"""Softmax is computed in powers of two, which GPUs have an instruction for."""
_LOG2E = tl.constexpr(LOG2E)


@dataclass(frozen=True)
class KVAddress:
    """Where one layer of a FusedKV lies, for kernels that a CUDA graph holds.

    numbers: (4,) int64 on the device: the addresses of keys and of values, the distance of layers
    and that of heads, in elements. Graphs read them when they run, so other prompts' KV may be
    elsewhere.
    """

    numbers: Tensor
    layer: int


@dataclass(frozen=True)
class Tile:
    """What one program computes, and how. rows: of all heads together. keys: read at once."""

    rows: int
    keys: int
    warps: int
    stages: int


ROWS_WRITTEN = 16
"""Rows that one Triton program of the kernel `write_rows` writes, of one KV head."""
INTERPRETED = Tile(32, 32, warps=4, stages=2)
"""The tile in Triton's interpreter."""


def attend_scattered(
    call: AttentionCall,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    *,
    tile: Tile | None = None,
    place: KVAddress | None = None,
) -> Tensor:
    """Return the rows' attention, (1, rows, heads, head_dim), of the query's dtype.

    call: of one sequence, its query float16 or bfloat16. keys, values: (1, kv_heads, tokens,
    head_dim), index = position, of the same dtype; every position that a row may see must hold
    finite values. positions: (rows,) integers on the device, increasing; padding, at the end, has
    position -1 and gets zeros. tile: None chooses by the device. place: where keys and values are,
    read by the kernel when it runs; ``keys`` and ``values`` are only the rows' own then, of the
    same heads and dtype.
    """
    window, softcap, sinks = call.window, call.softcap, call.sinks
    _, heads, rows, width = call.query.shape
    kv_heads = keys.shape[1]
    query, keys, values = (_with_adjacent_numbers(one) for one in (call.query, keys, values))
    out = query.new_empty(1, rows, heads, width)
    constants = constants_of(
        query.dtype, heads // kv_heads, width,
        window=window is not None, softcap=softcap is not None, sinks=sinks is not None,
    )  # fmt: skip
    is_plain = window is None and softcap is None and sinks is None
    tile = tile or _tile_on(query.device, width, rows * heads, plain=is_plain)
    programs = (triton.cdiv(rows * (heads // kv_heads), tile.rows), kv_heads)
    with torch.cuda.device_of(query):  # type: ignore[no-untyped-call]
        _attend[programs](
            query, keys, values, positions, out,
            positions if place is None else place.numbers, 0 if place is None else place.layer,
            positions if sinks is None else sinks,
            rows, window or 0, call.scaling * LOG2E if softcap is None else call.scaling / softcap,
            0.0 if softcap is None else softcap * LOG2E,
            query.stride(1), query.stride(2),
            keys.stride(1), keys.stride(2) if place is None else width,
            values.stride(1), values.stride(2) if place is None else width,
            out.stride(2), out.stride(1),
            **constants, PLACED=place is not None, M=tile.rows, N=tile.keys,
            num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=True,
        )  # fmt: skip
    return out


def takes(query: Tensor, keys: Tensor) -> bool:
    """Whether the kernel can compute these shapes and dtypes, of one sequence."""
    return (
        query.shape[0] == 1
        and query.dtype in {torch.float16, torch.bfloat16}
        and keys.dtype == query.dtype
        and LEAST_WIDTH <= query.shape[3] <= MOST_WIDTH
    )


@lru_cache(maxsize=256)
def constants_of(
    dtype: torch.dtype, copies: int, width: int, *, window: bool, softcap: bool, sinks: bool
) -> dict[str, Any]:
    """Return what the kernel is compiled for, its tile aside.

    copies: heads for each KV head. window, softcap, sinks: whether there are any.
    """
    return {
        "HAS_WINDOW": window,
        "HAS_SOFTCAP": softcap,
        "HAS_SINKS": sinks,
        "COPIES": copies,
        "D": width,
        "PADDED": triton.next_power_of_2(width),
        # Triton's interpreter has no arithmetic for bfloat16.
        "WIDE": triton.knobs.runtime.interpret or dtype == torch.float32,
    }


def tiles_on(device: torch.device, head_dim: int, *, plain: bool = False) -> tuple[Tile, ...]:
    """Return the tiles that the kernel may be run with on a device; plain: see ``tiles_for``."""
    if device.type != "cuda":
        return (INTERPRETED,)
    capability, _ = _facts(device)
    return tuple(dict.fromkeys(tiles_for(capability, head_dim, plain=plain)))


def tiles_for(
    capability: tuple[int, int], head_dim: int, *, plain: bool = False
) -> tuple[Tile, Tile]:
    """Return a large and a small tile that fit a GPU's registers and shared memory.

    capability: the GPU's compute capability, such as (9, 0). plain: whether there is neither a
    window, a softcap, nor sinks; otherwise they do whatever attention is like.
    """
    is_wide = head_dim > 128
    if capability == (9, 0):  # whose tensor cores want 64 rows or more
        if plain and not is_wide:
            # The fastest of twelve on an H100, for 205 to 1,229 rows of 4,096 to 16,384 tokens.
            return (Tile(64, 64, warps=4, stages=3),) * 2
        small = Tile(64, 32, warps=8 if is_wide else 4, stages=2)
        return small if is_wide else Tile(128, 64, warps=8, stages=2), small
    large = Tile(64, 64 if head_dim <= 64 else 32, warps=8 if is_wide else 4, stages=2)
    return large, Tile(32, 32, warps=4, stages=2)


def _tile_on(device: torch.device, head_dim: int, rows: int, *, plain: bool = False) -> Tile:
    """Return the tile for so many rows, of all heads together; plain: see ``tiles_for``.

    For few rows it is small, so that no multiprocessor is without work.
    """
    if device.type != "cuda":
        return INTERPRETED
    capability, processors = _facts(device)
    large, small = tiles_for(capability, head_dim, plain=plain)
    return large if large.rows * processors <= rows else small


@lru_cache(maxsize=16)
def _facts(device: torch.device) -> tuple[tuple[int, int], int]:
    """Return a GPU's compute capability, and how many multiprocessors it has."""
    facts = torch.cuda.get_device_properties(device)
    return (facts.major, facts.minor), facts.multi_processor_count


def _with_adjacent_numbers(part: Tensor) -> Tensor:
    return part if part.stride(3) == 1 else part.contiguous()


@triton.jit(
    # or prompts of other lengths would have to wait for the compiler
    do_not_specialize=["layer", "rows", "window"],
    do_not_specialize_on_alignment=["positions", "sinks"],
)
def _attend(
    query: tl.tensor, keys: tl.tensor, values: tl.tensor, positions: tl.tensor, out: tl.tensor,
    place: tl.tensor, layer: tl.tensor, sinks: tl.tensor,
    rows: tl.tensor, window: tl.tensor, scaling: tl.tensor, softcap: tl.tensor,
    q_head: tl.tensor, q_row: tl.tensor, k_head: tl.tensor, k_token: tl.tensor,
    v_head: tl.tensor, v_token: tl.tensor, o_head: tl.tensor, o_row: tl.tensor,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    COPIES: tl.constexpr, D: tl.constexpr, PADDED: tl.constexpr, WIDE: tl.constexpr,
    PLACED: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
) -> None:  # fmt: skip
    """One tile: M of (rows x heads of one KV head), the heads of a row side by side."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # those with the most keys first
    kv_head = tl.program_id(1)
    m = tile * M + tl.arange(0, M)
    row = m // COPIES
    head = kv_head * COPIES + m % COPIES
    exists = row < rows
    position = tl.load(positions + row, mask=exists, other=-1).to(tl.int32)
    first = tl.load(positions + tile * M // COPIES).to(tl.int32)
    last = tl.max(position, 0)

    d = tl.arange(0, PADDED)
    wanted = exists[:, None] & (d < D)[None, :]
    here = head[:, None].to(tl.int64) * q_head + row[:, None].to(tl.int64) * q_row + d[None, :]
    q = tl.load(query + here, mask=wanted, other=0.0)
    if PLACED:
        of_layer = _layer_of(place, layer)
        of_head = of_layer + kv_head * tl.multiple_of(tl.load(place + 3), 16)
        k = tl.multiple_of(tl.load(place).to(tl.pointer_type(query.dtype.element_ty)), 16) + of_head
        v = (
            tl.multiple_of(tl.load(place + 1).to(tl.pointer_type(query.dtype.element_ty)), 16)
            + of_head
        )
    else:
        k = keys + kv_head.to(tl.int64) * k_head
        v = values + kv_head.to(tl.int64) * v_head
    if WIDE:
        q = q.to(tl.float32)

    most = tl.full((M,), float("-inf"), tl.float32)
    total = tl.full((M,), 0.0, tl.float32)
    if HAS_SINKS:  # each is one more key, of which the value is zero
        most = tl.load(sinks + head, mask=exists, other=0.0).to(tl.float32) * _LOG2E
        total += 1.0
    acc = tl.full((M, PADDED), 0.0, tl.float32)

    if HAS_WINDOW:
        start = tl.maximum(first - window + 1, 0)
    else:  # first the keys that all rows of the tile see
        start = (first + 1) // N * N
        acc, total, most = _attend_keys(
            acc, total, most, q, k, v, position,
            0, start, last, window, scaling, softcap, k_token, v_token,
            False, HAS_WINDOW, HAS_SOFTCAP, D, PADDED, N,
        )  # fmt: skip
    acc, total, most = _attend_keys(
        acc, total, most, q, k, v, position,
        start, last + 1, last, window, scaling, softcap, k_token, v_token,
        True, HAS_WINDOW, HAS_SOFTCAP, D, PADDED, N,
    )  # fmt: skip

    # Padding may share a tile with rows, and has then seen their keys.
    share = tl.where(position >= 0, 1.0 / tl.where(total == 0.0, 1.0, total), 0.0)
    here = head[:, None].to(tl.int64) * o_head + row[:, None].to(tl.int64) * o_row + d[None, :]
    tl.store(out + here, (acc * share[:, None]).to(out.dtype.element_ty), mask=wanted)


@triton.jit
def _layer_of(place: tl.tensor, layer: tl.tensor) -> tl.tensor:
    """Return how far a layer is behind the first, in elements."""
    return tl.multiple_of(tl.load(place + 2), 16) * layer


@triton.jit
def _attend_keys(
    acc: tl.tensor, total: tl.tensor, most: tl.tensor, q: tl.tensor,
    keys: tl.tensor, values: tl.tensor, position: tl.tensor,
    start: tl.tensor, stop: tl.tensor, last: tl.tensor, window: tl.tensor,
    scaling: tl.tensor, softcap: tl.tensor, k_token: tl.tensor, v_token: tl.tensor,
    MASKED: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    D: tl.constexpr, PADDED: tl.constexpr, N: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Add the keys from start to stop - 1 to the softmax: its sum, total and largest logit.

    MASKED: whether some row may not see all of them. No key after the last row is read: what is
    there may be no number.
    """
    for first in range(start, stop, N):
        n = first + tl.arange(0, N)
        inside = n <= last
        k = _load(keys, k_token, first, inside, MASKED, D, PADDED, N)
        v = _load(values, v_token, first, inside, MASKED, D, PADDED, N)
        k = k.to(q.dtype)
        v = v.to(q.dtype)
        logits = tl.dot(q, tl.trans(k)) * scaling
        if HAS_SOFTCAP:
            logits = softcap * _tanh(logits)
        if MASKED:
            seen = n[None, :] <= position[:, None]
            if HAS_WINDOW:
                seen = seen & (n[None, :] > position[:, None] - window)
            logits = tl.where(seen, logits, float("-inf"))
        new = tl.maximum(most, tl.max(logits, 1))
        finite = tl.where(new == float("-inf"), 0.0, new)  # of a row that has seen no key yet
        shares = tl.exp2(logits - finite[:, None])
        fade = tl.exp2(most - finite)
        total = total * fade + tl.sum(shares, 1)
        acc = acc * fade[:, None] + tl.dot(shares.to(q.dtype), v)
        most = new
    return acc, total, most


@triton.jit
def _load(
    numbers: tl.tensor, step: tl.tensor, first: tl.tensor, inside: tl.tensor,
    MASKED: tl.constexpr, D: tl.constexpr, PADDED: tl.constexpr, N: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """(N, PADDED) of the keys or values from token ``first`` on; zeros outside."""
    d = tl.arange(0, PADDED)
    here = numbers + tl.cast(first, tl.int64) * step
    places = here + tl.arange(0, N)[:, None] * step + d[None, :]
    if MASKED:
        return tl.load(places, mask=inside[:, None] & (d < D)[None, :], other=0)
    elif D == PADDED:
        return tl.load(places)
    else:
        return tl.load(places, mask=(d < D)[None, :], other=0)


@triton.jit
def _tanh(x: tl.tensor) -> tl.tensor:
    """Hyperbolic tangent, of the exponential function that every version of Triton has."""
    small = tl.exp2(tl.abs(x) * (-2.0 * _LOG2E))
    size = (1.0 - small) / (1.0 + small)
    return tl.where(x < 0, -size, size)


def write_rows(keys: Tensor, values: Tensor, positions: Tensor, place: KVAddress) -> None:
    """Write rows' fresh KV, (1, kv_heads, rows, head_dim) each, to ``positions`` of a layer.

    positions: (rows,) int64 on the device; a row at -1 is written nowhere. The layer holds as many
    heads, of the same width and dtype.
    """
    _, heads, rows, width = keys.shape
    keys, values = (one if one.stride(3) == 1 else one.contiguous() for one in (keys, values))
    with torch.cuda.device_of(keys):  # type: ignore[no-untyped-call]
        _write[(triton.cdiv(rows, ROWS_WRITTEN), heads)](
            keys, values, positions, place.numbers, place.layer, rows,
            keys.stride(1), keys.stride(2), values.stride(1), values.stride(2),
            D=width, PADDED=triton.next_power_of_2(width), N=ROWS_WRITTEN,
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
