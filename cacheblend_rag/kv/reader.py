"""Reads the layers of a stored chunk whose head has been read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from cacheblend_rag.errors import DamagedChunkError
from cacheblend_rag.kv import codec
from cacheblend_rag.kv.chunk_kv import ChunkKV, KVKey
from cacheblend_rag.kv.mac import CHECKSUM, Mac
from cacheblend_rag.settings import Precision

UNPACKED_BYTES = 1 << 20
"""How many numbers of a chunk in memory to unpack together."""


class ChunkReader(ABC):
    """One chunk in a tier. Safe to share between threads.

    shape: of keys and of values, (layers, kv_heads, tokens, head_dim). position, prior, precision:
    see ChunkKV. written_at: when it was first stored. starts: the first layer of each part of the
    chunk, whose layers are read together. in_memory: whether reading is unnecessary.
    """

    in_memory: ClassVar[bool] = False

    shape: tuple[int, int, int, int]
    dtype: torch.dtype
    position: int
    prior: Tensor | None
    precision: Precision
    written_at: float
    starts: Sequence[int]

    @property
    def layers(self) -> int:
        """Number of layers."""
        return self.shape[0]

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer's numbers in the prompt's form; 0 if they are in memory already."""
        _, kv_heads, tokens, head_dim = self.shape
        return 2 * kv_heads * tokens * head_dim * self.dtype.itemsize

    @abstractmethod
    def read(self, first: int, last: int) -> ChunkKV:
        """Read and check layers ``first`` to ``last - 1``; raises as a tier's ``_load`` does."""

    def whole(self) -> ChunkKV:
        """Read and check all layers at once; raises as ``read``."""
        return self.read(0, self.layers)


class WholeReader(ChunkReader):
    """A chunk that is in memory."""

    in_memory: ClassVar[bool] = True

    def __init__(self, kv: ChunkKV, written_at: float) -> None:
        self.kv, self.written_at = kv, written_at
        self.shape, self.starts = kv.shape, (0,)
        self.dtype, self.position, self.prior = kv.dtype, kv.position, kv.prior
        self.precision = kv.precision
        if self.layer_bytes:
            self.starts = range(0, self.layers, max(1, UNPACKED_BYTES // self.layer_bytes))

    @property
    def layer_bytes(self) -> int:
        """0, unless it must be unpacked."""
        return 0 if self.kv.precision == "native" else super().layer_bytes

    def read(self, first: int, last: int) -> ChunkKV:
        """Return layers ``first`` to ``last - 1``, not copied."""
        return self.kv.part(first, last)


@dataclass(frozen=True, slots=True)
class StoredBytes:
    """Bytes that were read of an object: all of them or a range.

    raw: (bytes,) uint8, in memory of its own. total: bytes of the whole object. written_at: when
    the chunk was first stored, a Unix time.
    """

    raw: Tensor
    total: int
    written_at: float


ReadRange = Callable[[int, int], StoredBytes | None]
"""Reads an object's bytes from start to end, or to its own end if that is first; None: gone."""


class RangeReader(ChunkReader):
    """A chunk in a tier of bytes: each layer is one range of them."""

    def __init__(
        self, head: codec.Head, read_range: ReadRange, written_at: float, least: int, most: int
    ) -> None:
        self._head, self._read_range, self._stored_at = head, read_range, written_at
        self.written_at = written_at if head.written_at is None else head.written_at
        self.shape = head.shape
        self.dtype, self.position, self.prior = head.dtype, head.position, head.prior
        self.precision = head.precision
        # What is read ahead is limited as it is unpacked.
        self.starts = _starts(self.layers, least // head.layer_bytes, most // self.layer_bytes)

    def read(self, first: int, last: int) -> ChunkKV:
        """Read the layers as one range; also raises OSError if the object was replaced."""
        span = self._head.span(first, last)
        raw = _part_of(self._read_range, *span, self._head.nbytes, self._stored_at)
        return self._head.checked(first, last, raw)


def open_ranges(
    key: KVKey,
    start: StoredBytes,
    read_range: ReadRange,
    *,
    least: int,
    most: int = 0,
    mac: Mac = CHECKSUM,
) -> ChunkReader:
    """Return a reader of an object that is read by byte ranges.

    start: its first bytes, ``codec.HEAD_BYTES`` at least, or all it has. least: bytes that are
    worth a separate read. most: each range is twice as large as the one before, up to so many
    bytes, unpacked. Raises the errors of ``codec.read_head`` and ``read_range``.
    """
    first, total, written_at = start.raw, start.total, start.written_at

    def read(begin: int, end: int) -> Tensor:
        if end <= first.numel():
            return first[begin:end]
        return _part_of(read_range, begin, end, total, written_at)

    if not total:
        raise DamagedChunkError("empty")
    head = codec.read_head(read, total, key, mac)
    reader = RangeReader(head, read_range, written_at, least, most)
    if first.numel() < total:
        return reader
    kv = head.checked(0, reader.layers, first[head.start :])
    return WholeReader(kv, reader.written_at)


def _part_of(read_range: ReadRange, begin: int, end: int, total: int, written_at: float) -> Tensor:
    """Read bytes of an object with this beginning; raises OSError if it was replaced."""
    found = read_range(begin, end)
    if found is None or (found.total, found.written_at) != (total, written_at):
        raise OSError("the object was removed or replaced while it was read")
    return found.raw


def _starts(layers: int, least: int, most: int) -> list[int]:
    """Return the index of the first layer of each read, for reads of growing size.

    The first read has ``least`` layers, at least one; each further one twice as many as the one
    before, up to ``most`` layers.
    """
    starts, size = [0], max(1, least)
    while starts[-1] + size < layers:
        starts.append(starts[-1] + size)
        size = max(size, min(2 * size, most))
    return starts
