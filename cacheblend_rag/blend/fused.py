"""FusedKV: one buffer for a whole prompt's KV, filled from cached chunks and from fresh rows."""

from __future__ import annotations

import torch
from torch import Tensor

from cacheblend_rag.blend.rotary import rotate_into
from cacheblend_rag.blend.rows import Rows
from cacheblend_rag.blend.stack import DecoderStack, Geometry
from cacheblend_rag.kv.chunk_kv import ChunkKV


class FusedKV:
    """The KV of a prompt, and room for the tokens that will be decoded after it.

    keys, values: (layers, kv_heads, capacity, head_dim), index = position.
    """

    def __init__(self, geometry: Geometry, tokens: int, reserve: int = 0) -> None:
        shape = (geometry.layers, geometry.kv_heads, tokens + reserve, geometry.head_dim)
        self.tokens = tokens
        self.keys = torch.empty(shape, dtype=geometry.dtype, device=geometry.device)
        self.values = torch.empty(shape, dtype=geometry.dtype, device=geometry.device)

    @staticmethod
    def bytes_for(geometry: Geometry, tokens: int) -> int:
        """Return what the KV of so many tokens takes, in bytes."""
        elements = 2 * geometry.layers * geometry.kv_heads * tokens * geometry.head_dim
        return elements * geometry.dtype.itemsize

    def fits(self, kv: ChunkKV, tokens: int) -> bool:
        """Whether a chunk KV has this model's shape and type, and so many tokens."""
        layers, kv_heads, _, head_dim = self.keys.shape
        wanted = (layers, kv_heads, tokens, head_dim)
        return tuple(kv.keys.shape) == wanted and kv.keys.dtype == self.keys.dtype

    def place(self, stack: DecoderStack, kv: ChunkKV, start: int) -> None:
        """Lay a chunk's KV at positions start .. start + kv.tokens - 1, keys re-rotated."""
        end = start + kv.tokens
        device = self.keys.device
        keys, values = kv.keys.to(device), kv.values.to(device)
        self.values[:, :, start:end] = values
        if start == kv.position:
            self.keys[:, :, start:end] = keys
        else:
            rotate_into(self.keys[:, :, start:end], keys, stack.rotation(start - kv.position))

    def write(self, layer: int, rows: Rows, keys: Tensor, values: Tensor) -> None:
        """Store fresh KV (1, kv_heads, rows, head_dim) of ``rows``."""
        if rows.is_run:
            self.keys[layer, :, rows.first : rows.last + 1] = keys[0]
            self.values[layer, :, rows.first : rows.last + 1] = values[0]
        else:
            self.keys[layer].index_copy_(1, rows.device, keys[0])
            self.values[layer].index_copy_(1, rows.device, values[0])

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, each (1, kv_heads, tokens, head_dim), not copied."""
        return (
            self.keys[layer, None, :, : self.tokens],
            self.values[layer, None, :, : self.tokens],
        )

    def slice(self, start: int, end: int) -> ChunkKV:
        """Return a copy of positions [start, end) as a chunk KV computed at ``start``."""
        return ChunkKV(
            self.keys[:, :, start:end].clone(), self.values[:, :, start:end].clone(), start
        )
