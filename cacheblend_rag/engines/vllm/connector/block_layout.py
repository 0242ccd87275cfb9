"""Finds out where a block of vLLM's cache keeps each number, so that KV can be read back.

Attention backends lay blocks out in their own ways, and a CPU's differ by processor. The backend's
own function writes numbers that are all different; where they are found is the layout. Which of the
formats with 8 bits a cache has is found out in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

DIGITS = 128
"""Numbers are written digit by digit: so many values, and zero, are exact in 16 bits."""
FP8_DIGITS = 4
"""The same in each of FP8."""
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


@dataclass(frozen=True)
class BlockLayout:
    """Where a block keeps the KV of its tokens.

    places: indices into the flattened block, (2, tokens, kv_heads, head_dim) int64, of keys and
    values. fp8: one of FP8 if the block keeps numbers in it, divided by their layer's scale.
    """

    places: Tensor
    fp8: torch.dtype | None = None

    def read(self, layer: Any, blocks: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Read KV as the layer's attention does.

        Args:
            layer: one of vLLM's attention layers.
            blocks: of its cache, (blocks, ...).
            dtype: of the result.

        Returns:
            Keys and values, each (kv_heads, tokens, head_dim).
        """
        rows = blocks.view(torch.uint8) if self.fp8 else blocks
        kv = rows.flatten(1)[:, self.places.flatten()].view(len(blocks), *self.places.shape)
        if self.fp8 is None:
            keys, values = kv.permute(1, 3, 0, 2, 4).flatten(2, 3)
            return keys, values
        keys, values = kv.view(self.fp8).float().permute(1, 3, 0, 2, 4).flatten(2, 3)
        by_key, by_value = (scale[:, None, None] for scale in _scales(layer))
        return (keys * by_key).to(dtype), (values * by_value).to(dtype)


def block_layout(
    layer: Any, block: Tensor, shape: tuple[int, int, int], dtype: torch.dtype
) -> BlockLayout | None:
    """Return where a block keeps the KV of its tokens.

    Args:
        layer: one of vLLM's attention layers.
        block: an empty cache of one kernel block; it is overwritten.
        shape: tokens of the block, KV heads, head dimension.
        dtype: of the keys and values that are written.

    Returns:
        None if it does not keep each number once, as it was written or in one of FP8.
    """
    if block.dtype == dtype:
        places = _places(layer, block, shape, dtype, None)
        return None if places is None else BlockLayout(places)
    for fp8 in FP8 if block.itemsize == 1 else ():
        if (places := _places(layer, block, shape, dtype, fp8)) is not None:
            return BlockLayout(places, fp8)
    return None


def _places(
    layer: Any,
    block: Tensor,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    fp8: torch.dtype | None,
) -> Tensor | None:
    digits = DIGITS if fp8 is None else FP8_DIGITS
    numbers = torch.arange(2 * shape[0] * shape[1] * shape[2], device=block.device)
    slots = torch.arange(shape[0], device=block.device)
    cells = torch.zeros(block.numel(), dtype=torch.int64, device=block.device)
    is_used = torch.ones_like(cells, dtype=torch.bool)
    worth = 1
    while worth <= len(numbers):
        keys, values = (numbers // worth % digits + 1).view(2, *shape).float()
        if fp8 is not None:
            by_key, by_value = (scale[None, :, None] for scale in _scales(layer))
            keys, values = keys * by_key, values * by_value
        block.zero_()
        layer.impl.do_kv_cache_update(layer, keys.to(dtype), values.to(dtype), block, slots)
        held = block.reshape(-1) if fp8 is None else block.reshape(-1).view(fp8)
        found = held.float().nan_to_num().long()
        is_used &= found > 0
        cells += (found - 1) * worth
        worth *= digits
    where = torch.nonzero(is_used).flatten()
    if not torch.equal(cells[where].sort().values, numbers):
        return None
    places = torch.empty_like(numbers)
    places[cells[where]] = where
    return places.view(2, *shape)


def _scales(layer: Any) -> tuple[Tensor, Tensor]:
    """Return what a layer's cache divides keys and values by, (1 or kv_heads,) float32 each."""
    return layer._k_scale.float().reshape(-1), layer._v_scale.float().reshape(-1)
