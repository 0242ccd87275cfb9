"""Places one layer of all chunks of a prompt by one launch; its twin is ``place_parts``.

``LayerLaunches`` does so for chunks of which all layers are in memory: one table has the addresses
of every layer, and Triton works out once what it launches with, which takes longer than the launch.

A program unpacks some tokens of one head of one chunk, rotates the keys in float32, and writes both
where the prompt has them, into the buffer of a pass. A table gives it the addresses of each chunk's
tensors, which may be in page-locked memory of the host: few programs, which take one part after the
other, read that as fast as the link allows, and leave the device to the layer that it computes
meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from cacheblend_rag.blend.fused import FusedKV
from cacheblend_rag.blend.layer_part import LayerPart, WholePart
from cacheblend_rag.kv.chunk_kv import ChunkKV

TILE = 16
"""Tokens of a head that a program handles at once."""
PROGRAMS, LINK_PROGRAMS = 1056, 24
"""Most programs at once: where all chunks are on the device, and where any is on the host."""
NATIVE, FP8 = 0, 1
COLUMNS = 12
_NO_ALIGNMENT_BEYOND = 16
CONSTANTS = (
    "FORM", "INTERLEAVED", "PAIRS", "PP", "HEADS", "D", "DP", "ALIGN", "TOKENS",
)  # fmt: skip
"""The kernel's last arguments, for each combination of which it is compiled."""


@triton.jit
def _two_to_the(exponents: tl.tensor) -> tl.tensor:
    return ((exponents.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _number(codes: tl.tensor, FORM: tl.constexpr) -> tl.tensor:
    """Return codes as float32 numbers, without their scales."""
    if FORM == 1:  # e4m3; by its bits, since not every GPU converts it
        bits = codes.to(tl.int32)
        digits = bits & 0x7F
        normal = ((digits << 20) + (120 << 23)).to(tl.float32, bitcast=True)
        least = digits.to(tl.float32) * 0.001953125
        size = tl.where(digits < 8, least, normal)
        return tl.where(bits > 0x7F, -size, size)
    else:
        return codes.to(tl.float32)


@triton.jit
def _scale(row: tl.tensor, head: tl.tensor, COLUMN: tl.constexpr) -> tl.tensor:
    """Return the scale of a head's keys or values, whose exponents' address is in a column."""
    own = tl.load(row + COLUMN).to(tl.pointer_type(tl.int8)) + head * tl.load(row + COLUMN + 1)
    return _two_to_the(tl.load(own))


@triton.jit
def _rotated(
    x1: tl.tensor,
    x2: tl.tensor,
    row: tl.tensor,
    p: tl.tensor,
    PAIRS: tl.constexpr,
    TYPE: tl.constexpr,
) -> tl.tensor:
    """Return pairs of components rotated as a chunk's row says, if it does."""
    cos = tl.load(row + 8)
    is_turned = p < tl.where(cos > 0, PAIRS, 0).to(tl.int32)
    sin = tl.load(row + 9).to(tl.pointer_type(tl.float32))
    cos = cos.to(tl.pointer_type(tl.float32))
    c = tl.load(cos + p, mask=is_turned, other=1.0)[None, :]
    s = tl.load(sin + p, mask=is_turned, other=0.0)[None, :]
    return (x1 * c - x2 * s).to(TYPE), (x2 * c + x1 * s).to(TYPE)


@triton.jit(do_not_specialize=("first", "tiles", "total"))
def place_kernel(
    TABLE: tl.tensor, KEYS: tl.tensor, VALUES: tl.tensor, apart: tl.tensor,
    first: tl.tensor, tiles: tl.tensor, total: tl.tensor,
    FORM: tl.constexpr, INTERLEAVED: tl.constexpr, PAIRS: tl.constexpr, PP: tl.constexpr,
    HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, ALIGN: tl.constexpr,
    TOKENS: tl.constexpr,
) -> None:  # fmt: skip
    """Place ``total`` tiles: of each chunk from row ``first`` on ``tiles`` a head, some empty.

    TABLE: see ``table_of``. ALIGN: what the addresses of all heads of chunks divide by, in bytes.
    KEYS, VALUES: of the buffer, whose heads are ``apart``, and each token's numbers behind those of
    the one before.
    """
    TYPE: tl.constexpr = KEYS.dtype.element_ty
    STORED: tl.constexpr = tl.uint8 if FORM else TYPE
    p, d = tl.arange(0, PP), tl.arange(0, DP)
    one = 2 * p if INTERLEAVED else p
    other = one + 1 if INTERLEAVED else p + PAIRS
    for index in range(tl.program_id(0), total, tl.num_programs(0)):
        row = TABLE + (first + index // (tiles * HEADS)) * 12
        head = (index // tiles % HEADS).to(tl.int64)
        t = (index % tiles) * TOKENS + tl.arange(0, TOKENS)
        there = t < tl.load(row + 11).to(tl.int32)
        if (index % tiles) * TOKENS < tl.load(row + 11):
            keys = tl.load(row).to(tl.pointer_type(STORED)) + head * tl.load(row + 2)
            values = tl.load(row + 1).to(tl.pointer_type(STORED)) + head * tl.load(row + 3)
            keys = tl.multiple_of(keys, ALIGN) + t[:, None] * D
            values = tl.multiple_of(values, ALIGN) + t[:, None] * D
            both = there[:, None] & (p < PAIRS)[None, :]
            whole = there[:, None] & (d < D)[None, :]
            rest = whole & (d >= 2 * PAIRS)[None, :]
            x1 = _number(tl.load(keys + one[None, :], mask=both, other=0), FORM)
            x2 = _number(tl.load(keys + other[None, :], mask=both, other=0), FORM)
            r = tl.load(keys + d[None, :], mask=rest, other=0)
            v = tl.load(values + d[None, :], mask=whole, other=0)
            if FORM != 0:
                scale = _scale(row, head, 4)
                x1 *= scale
                x2 *= scale
                # as numbers of the model's type, which the twin rotates
                x1, x2 = x1.to(TYPE).to(tl.float32), x2.to(TYPE).to(tl.float32)
                r = (_number(r, FORM) * scale).to(TYPE)
                v = (_number(v, FORM) * _scale(row, head, 6)).to(TYPE)
            y1, y2 = _rotated(x1, x2, row, p, PAIRS, TYPE)
            position = tl.load(row + 10) + t
            into = KEYS + head * apart + position[:, None] * D
            tl.store(into + one[None, :], y1, mask=both)
            tl.store(into + other[None, :], y2, mask=both)
            tl.store(into + d[None, :], r, mask=rest)
            into = VALUES + head * apart + position[:, None] * D
            tl.store(into + d[None, :], v, mask=whole)


@dataclass(frozen=True)
class Launch:
    """Chunks in one form, which one launch places. rows: of the table, see ``table_of``.

    tokens: of the longest. align: what the addresses of all tokens' keys and values divide by, in
    bytes, at most 16. turn: (pairs of a rotation, whether they are interleaved).
    """

    form: int
    rows: slice
    tokens: int
    align: int
    turn: tuple[int, bool]


def table_of(parts: Sequence[LayerPart]) -> tuple[list[list[int]], list[Launch]]:
    """Return the table of a layer's chunks, COLUMNS numbers for each, and its launches.

    A row has the addresses of keys and of values, how far heads are apart in each, the same of
    their exponents, the addresses of cos and sin (0: not rotated), first position, and tokens.
    """
    order = by_form([part.kv for part in parts])
    return launches_of([parts[index] for index in order])


def by_form(kvs: Sequence[ChunkKV]) -> list[int]:
    """Return the indices of chunks, or of layers of them, those of one form together."""
    forms = [_form_of(kv) for kv in kvs]
    return sorted(range(len(kvs)), key=forms.__getitem__)


def launches_of(parts: Sequence[LayerPart]) -> tuple[list[list[int]], list[Launch]]:
    """As ``table_of``, of chunks in the order of ``by_form``."""
    table = [_row(part) for part in parts]
    launches = []
    for form, group in groupby(range(len(parts)), lambda index: _form_of(parts[index].kv)):
        indices = list(group)
        rows = slice(indices[0], indices[-1] + 1)
        mine = parts[rows]
        turns = {_turn_of(part) for part in mine} - {None}
        if len(turns) > 1:
            raise ValueError("chunks of one layer are rotated in different ways")
        size = mine[0].kv.numbers.itemsize
        strides = [n * size for row in table[rows] for n in row[2:4]]
        strides.append(mine[0].kv.numbers.shape[-1] * size)
        addresses = [address for row in table[rows] for address in row[:2]]
        align = math.gcd(_NO_ALIGNMENT_BEYOND, *addresses, *strides)
        longest = max(part.kv.tokens for part in mine)
        turn = next(iter(turns), None) or (0, False)
        launches.append(Launch(form, rows, longest, align, turn))
    return table, launches


def place_by_kernel(
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    launches: Sequence[Launch],
    *,
    programs: int = PROGRAMS,
) -> None:
    """Place chunks into a layer, (kv_heads, capacity, head_dim), of keys and of values.

    The two are alike: each head's tokens follow one another, and heads are as far apart in both.
    table: what ``table_of`` returned, (chunks, COLUMNS) int64, on the device.
    """
    for launch in launches:
        grid = grid_of(launch, keys.shape[0], programs)
        place_kernel[grid](*arguments_of(launch, keys, values, table))


def grid_of(launch: Launch, heads: int, programs: int) -> tuple[int, int, int]:
    """Return a launch's grid, of at most so many programs."""
    return min(_tiles(launch) * heads * _count(launch), programs), 1, 1


def arguments_of(launch: Launch, keys: Tensor, values: Tensor, table: Tensor) -> tuple[Any, ...]:
    """Return the kernel's arguments in order; see ``place_by_kernel``."""
    heads, _, width = keys.shape
    if keys.stride() != values.stride() or keys.stride()[1:] != (width, 1):
        raise ValueError("keys and values differ in strides, or tokens do not follow one another")
    pairs, interleaved = launch.turn
    tiles = _tiles(launch)
    constants: dict[str, Any] = {
        **constants_of(launch.form, heads, width, pairs, launch.align),
        "INTERLEAVED": interleaved,
    }
    return (
        table, keys, values, keys.stride(0),
        launch.rows.start, tiles, tiles * heads * _count(launch),
        *(constants[name] for name in CONSTANTS),
    )  # fmt: skip


def _tiles(launch: Launch) -> int:
    return -(-launch.tokens // TILE)


def _count(launch: Launch) -> int:
    count: int = launch.rows.stop - launch.rows.start
    return count


def constants_of(form: int, heads: int, width: int, pairs: int, align: int) -> dict[str, int]:
    """Return the kernel's constants that depend on the chunks' form and the model."""
    return {
        "FORM": form,
        "PAIRS": pairs,
        "PP": triton.next_power_of_2(max(1, pairs)),
        "HEADS": heads,
        "D": width,
        "DP": triton.next_power_of_2(width),
        "ALIGN": align,
        "TOKENS": TILE,
    }


def _form_of(kv: ChunkKV) -> int:
    return NATIVE if kv.scales is None else FP8


def _turn_of(part: LayerPart) -> tuple[int, bool] | None:
    if part.turn is None or not part.turn.cos.shape[-1]:
        return None
    return part.turn.cos.shape[-1], part.turn.interleaved


def _row(part: LayerPart) -> list[int]:
    ((keys, values),) = part.kv.numbers
    scales = [0] * 4
    if part.kv.scales is not None:
        scales = [
            number
            for own in part.kv.scales.view(2, -1)
            for number in (own.data_ptr(), own.stride(0))
        ]
    turn = [0, 0]
    if part.turn is not None and _turn_of(part):
        turn = [part.turn.cos.data_ptr(), part.turn.sin.data_ptr()]
    return [
        keys.data_ptr(), values.data_ptr(), keys.stride(0), values.stride(0),
        *scales, *turn, part.start, part.kv.tokens,
    ]  # fmt: skip


def is_readable(part: LayerPart) -> bool:
    """Whether the kernel supports a chunk's precision and strides: each head's row contiguous."""
    numbers = part.kv.numbers
    contiguous = numbers.stride(-1) == 1 and numbers.stride(-2) == numbers.shape[-1]
    return part.kernel_supports and contiguous


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
    numbers = kv.numbers.stride(0) * kv.numbers.itemsize
    scales = 0 if kv.scales is None else kv.scales.stride(0)
    own = [numbers, numbers, 0, 0, scales, 0, scales, 0]
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
