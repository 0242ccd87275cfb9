"""One chunk's keys and values with one byte per number, as they are stored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from cacheblend_rag.kv.chunk_kv import ChunkKV
from cacheblend_rag.kv.precision import pack, unpack
from cacheblend_rag.settings import Precision


@dataclass(frozen=True, slots=True, eq=False)
class PackedLayer:
    """One layer of a chunk, or some of its tokens.

    codes: (2, kv_heads, tokens, head_dim), keys before values. exponents: of their scales,
    (2 * kv_heads,) int8. dtype: of the numbers.
    """

    codes: Tensor
    exponents: Tensor
    dtype: torch.dtype

    def unpacked(self) -> tuple[Tensor, Tensor]:
        """Return keys and values, each (kv_heads, tokens, head_dim)."""
        return unpack(self.codes, self.exponents, self.dtype)

    @property
    def tokens(self) -> int:
        """Number of the chunk's tokens."""
        return int(self.codes.shape[2])

    @property
    def row_bytes(self) -> int:
        """Bytes per token after unpacking, which exceed those of codes and scales."""
        return self.codes[:, :, 0].numel() * self.dtype.itemsize

    @property
    def tensors(self) -> Sequence[Tensor]:
        """The tensors to copy."""
        return self.codes, self.exponents

    def cut(self, start: int, end: int) -> PackedLayer:
        """Return some of its tokens: views, since a copy stream would not wait for a copy."""
        return replace(self, codes=self.codes[:, :, start:end])

    def moved(self, tensors: Sequence[Tensor]) -> PackedLayer:
        """Return the same tokens, given their tensors on a device."""
        codes, exponents = tensors
        return replace(self, codes=codes, exponents=exponents)


@dataclass(frozen=True, slots=True, eq=False)
class PackedKV:
    """One chunk's KV, one byte per number.

    Args:
        codes: (layers, 2, kv_heads, tokens, head_dim), keys before values; each layer contiguous.
        exponents: of their scales, (layers, 2 * kv_heads) int8.
        dtype: of the numbers, as the model computed them.
        position, prior: see ChunkKV.
    """

    codes: Tensor
    exponents: Tensor
    dtype: torch.dtype
    position: int
    prior: Tensor | None
    precision: ClassVar[Precision] = "fp8"

    @classmethod
    def of(cls, kv: ChunkKV) -> PackedKV:
        """Round a chunk's numbers."""
        packed = [pack(*layer) for layer in zip(kv.keys, kv.values, strict=True)]
        codes, exponents = (torch.stack(parts) for parts in zip(*packed, strict=True))
        return cls(codes, exponents, kv.dtype, kv.position, kv.prior)

    @classmethod
    def joined(cls, layers: Sequence[PackedLayer], position: int, prior: Tensor | None) -> PackedKV:
        """Return the chunk of these layers, which are copied."""
        codes = torch.stack([layer.codes for layer in layers])
        exponents = torch.stack([layer.exponents for layer in layers])
        return cls(codes, exponents, layers[0].dtype, position, prior)

    @property
    def shape(self) -> torch.Size:
        """Of keys and of values: (layers, kv_heads, tokens, head_dim)."""
        return self.codes[:, 0].shape

    @property
    def tokens(self) -> int:
        """Number of the chunk's tokens."""
        return int(self.codes.shape[3])

    @property
    def nbytes(self) -> int:
        """Bytes held by the tensors."""
        prior = 0 if self.prior is None else self.prior.nbytes
        return self.codes.nbytes + self.exponents.nbytes + prior

    def layer(self, index: int) -> PackedLayer:
        """Return one layer, not copied."""
        return PackedLayer(self.codes[index], self.exponents[index], self.dtype)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> PackedKV:
        """Return the same chunk KV with each of its tensors as ``change`` returns it."""
        prior = None if self.prior is None else change(self.prior)
        codes, exponents = change(self.codes), change(self.exponents)
        return replace(self, codes=codes, exponents=exponents, prior=prior)

    def unpacked(self) -> ChunkKV:
        """Return the chunk with its numbers in the model's type."""
        keys = torch.empty(self.shape, dtype=self.dtype, device=self.codes.device)
        values = torch.empty_like(keys)
        for index in range(len(keys)):
            keys[index], values[index] = self.layer(index).unpacked()
        return ChunkKV(keys, values, self.position, self.prior, self.precision)


StoredKV = ChunkKV | PackedKV
"""A chunk as tiers keep it."""
LayerKV = tuple[Tensor, Tensor] | PackedLayer
"""One layer's keys and values, each (kv_heads, tokens, head_dim), or both packed."""


def packed(kv: ChunkKV, precision: Precision) -> StoredKV:
    """Return a chunk as it is stored: packed if it was rounded, or the store rounds.

    Packing a chunk that was rounded before gives the same codes.
    """
    return PackedKV.of(kv) if "fp8" in (kv.precision, precision) else kv


def unpacked(kv: StoredKV) -> ChunkKV:
    """Return a chunk with its numbers in the model's type."""
    return kv if isinstance(kv, ChunkKV) else kv.unpacked()


def unpacked_layer(layer: LayerKV) -> tuple[Tensor, Tensor]:
    """Return one layer's keys and values."""
    return layer.unpacked() if isinstance(layer, PackedLayer) else layer
