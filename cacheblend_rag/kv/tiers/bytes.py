"""The base class of tiers that store bytes: encoding, decoding, checks and range reads.

A chunk is one object in the codec's format under its key. A subclass reads, writes, lists and
removes bytes; this class encodes, decodes and checks them.
"""

from __future__ import annotations

import warnings
from abc import abstractmethod
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from cacheblend_rag.errors import DamagedChunkError
from cacheblend_rag.kv import codec
from cacheblend_rag.kv.chunk_kv import KVKey
from cacheblend_rag.kv.codec import ChunkObject
from cacheblend_rag.kv.reader import ChunkReader, StoredBytes, open_ranges
from cacheblend_rag.kv.stored_chunk import StoredChunk
from cacheblend_rag.kv.tiers.base import Tier

SUFFIX = ".safetensors"
"""The suffix of the names of files and objects."""


class BytesTier(Tier):
    """A tier that keeps chunks as bytes.

    A new one implements ``_entry``, ``entries`` and ``_drop`` as any tier, and ``_read`` and
    ``_write``, all of which may raise OSError. An object appears complete under its key or not at
    all, and is replaced, never modified.

    whole_bytes: objects up to this size are read at once. range_bytes: least bytes that are worth a
    separate read; smaller layers are read together. grown_range_bytes: up to this size, unpacked,
    each read of a chunk is twice as large as the one before.
    """

    whole_bytes: ClassVar[int] = 1 << 18
    range_bytes: ClassVar[int] = 1 << 20
    grown_range_bytes: ClassVar[int] = 0

    @abstractmethod
    def _read(self, key: KVKey, start: int, end: int) -> StoredBytes | None:
        """Read an object's bytes from ``start`` to ``end``, or to its own end if that is first.

        None when absent. Raises DamagedChunkError for an impossible size, or for fewer bytes than
        the object declares.
        """

    @abstractmethod
    def _write(self, key: KVKey, data: ChunkObject, written_at: float) -> None:
        """Store or replace an object, evicting others; raises RefusedError."""

    def _open(self, key: KVKey) -> ChunkReader | None:
        """Read an object's head; of an object without a valid head nothing more is read."""
        start = self._read(key, 0, max(self.whole_bytes, codec.HEAD_BYTES))
        if start is None:
            return None
        return open_ranges(
            key,
            start,
            partial(self._read, key),
            least=self.range_bytes,
            most=self.grown_range_bytes,
            mac=self.mac,
        )

    def _save(self, key: KVKey, chunk: StoredChunk) -> None:
        data = codec.ChunkObject(key, chunk.kv, self.mac, written_at=chunk.written_at)
        self._capacity.check_fits(data.nbytes)
        self._write(key, data, chunk.written_at)


def path_of(key: KVKey) -> str:
    """Return the path of a chunk's file or object in its tier's place."""
    return f"{key.chunk_id[:2]}/{key}{SUFFIX}"


def key_of(name: str) -> KVKey | None:
    """Return the key in a file or object name, None if it is no chunk's name."""
    return KVKey.parsed(name.removesuffix(SUFFIX)) if name.endswith(SUFFIX) else None


def tensor_of(data: Any) -> Tensor:
    """Return bytes as (bytes,) uint8 without a copy; they must not be written to."""
    array = np.frombuffer(data, dtype=np.uint8)
    return torch.from_numpy(array) if array.size else torch.empty(0, dtype=torch.uint8)


with warnings.catch_warnings():
    # torch warns once per process about read-only bytes. Nobody writes to these.
    warnings.simplefilter("ignore")
    tensor_of(b"\0")


def room_for(nbytes: int) -> Tensor:
    """Return memory to read bytes into, (nbytes,) uint8.

    Raises DamagedChunkError if no object can be that large, OSError if memory is short.
    """
    if nbytes > codec.MAX_BODY_BYTES:
        raise DamagedChunkError(f"more than {codec.MAX_BODY_BYTES} bytes")
    try:
        return torch.empty(nbytes, dtype=torch.uint8)
    except RuntimeError as error:
        raise OSError(f"no memory for {nbytes} bytes") from error
