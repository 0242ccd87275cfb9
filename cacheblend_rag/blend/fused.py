"""The buffer of a prompt's KV, filled layer by layer from cached chunks and from fresh rows.

``RingKV`` holds two layers only, for callers that take each layer once it is final.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from cacheblend_rag.blend.rotary import Rotation, rotate_into
from cacheblend_rag.blend.rows import Rows
from cacheblend_rag.blend.stack import Geometry


class FusedKV:
    """The KV of a prompt, with capacity for the tokens that will be decoded after it.

    keys, values: (layers, kv_heads, capacity, head_dim), index = position. keeps_layers: whether
    all layers are still there when the pass is over.
    """

    keeps_layers: ClassVar[bool] = True

    def __init__(self, geometry: Geometry, tokens: int, reserve: int = 0) -> None:
        shape = (geometry.layers, geometry.kv_heads, tokens + reserve, geometry.head_dim)
        self.tokens = tokens
        self.keys = torch.empty(shape, dtype=geometry.dtype, device=geometry.device)
        self.values = torch.empty_like(self.keys)

    @staticmethod
    def bytes_for(geometry: Geometry, tokens: int) -> int:
        """Return the size of the KV of so many tokens, in bytes."""
        elements = 2 * geometry.layers * geometry.kv_heads * tokens * geometry.head_dim
        return elements * geometry.dtype.itemsize

    def place(
        self, layer: int, start: int, keys: Tensor, values: Tensor, turn: Rotation | None
    ) -> None:
        """Copy a layer of a chunk's KV, (kv_heads, tokens, head_dim), to positions from ``start``.

        turn: this layer's rotation of the keys; None if they were computed at these positions.
        """
        here = slice(start, start + keys.shape[1])
        whole_keys, whole_values = self.of_layer(layer)
        whole_values[:, here] = values.to(whole_values.device)
        keys = keys.to(whole_keys.device)
        if turn is None:
            whole_keys[:, here] = keys
        else:
            rotate_into(whole_keys[None, :, here], keys[None], turn)

    def of_layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, each (kv_heads, capacity, head_dim), not copied."""
        slot = layer % len(self.keys)  # of a ring
        return self.keys[slot], self.values[slot]

    def write(self, layer: int, rows: Rows, keys: Tensor, values: Tensor) -> None:
        """Store fresh KV (1, kv_heads, rows, head_dim) of ``rows``."""
        whole_keys, whole_values = self.of_layer(layer)
        if rows.is_run:
            whole_keys[:, rows.first : rows.last + 1] = keys[0]
            whole_values[:, rows.first : rows.last + 1] = values[0]
        else:
            whole_keys.index_copy_(1, rows.device, keys[0])
            whole_values.index_copy_(1, rows.device, values[0])

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, each (1, kv_heads, tokens, head_dim), not copied."""
        keys, values = self.of_layer(layer)
        return keys[None, :, : self.tokens], values[None, :, : self.tokens]


class RingKV(FusedKV):
    """A ring of two layers of a prompt's KV: each layer overwrites the one before the last.

    keys, values: (2, kv_heads, tokens, head_dim).
    """

    LAYERS: ClassVar[int] = 2
    keeps_layers: ClassVar[bool] = False

    def __init__(self, geometry: Geometry, tokens: int) -> None:
        super().__init__(replace(geometry, layers=self.LAYERS), tokens)

    @staticmethod
    def bytes_for(geometry: Geometry, tokens: int) -> int:
        """Return the size of two layers' KV of so many tokens, in bytes."""
        return FusedKV.bytes_for(replace(geometry, layers=RingKV.LAYERS), tokens)
