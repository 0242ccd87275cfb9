"""Finds out where a block of vLLM's cache keeps each number, so that KV can be read back.

Attention backends lay blocks out in their own ways, and a CPU's differ by processor. The backend's
own function writes numbers that are all different; where they are found is the layout.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

DIGITS = 128
"""Numbers are written digit by digit: so many values, and zero, are exact in 16 bits."""


def block_layout(layer: Any, block: Tensor, shape: tuple[int, int, int]) -> Tensor | None:
    """Return where a block keeps the KV of its tokens.

    Args:
        layer: one of vLLM's attention layers.
        block: an empty cache of one kernel block; it is overwritten.
        shape: tokens of the block, KV heads, head dimension.

    Returns:
        Indices into the flattened block, (2, tokens, kv_heads, head_dim) int64, of keys and values.
        None if it does not keep each number once, as it was written.
    """
    numbers = torch.arange(2 * shape[0] * shape[1] * shape[2], device=block.device)
    slots = torch.arange(shape[0], device=block.device)
    cells = torch.zeros(block.numel(), dtype=torch.int64, device=block.device)
    is_used = torch.ones_like(cells, dtype=torch.bool)
    worth = 1
    while worth <= len(numbers):
        digits = (numbers // worth % DIGITS + 1).to(block.dtype).view(2, *shape)
        block.zero_()
        layer.impl.do_kv_cache_update(layer, digits[0], digits[1], block, slots)
        found = block.reshape(-1).long()
        is_used &= found > 0
        cells += (found - 1) * worth
        worth *= DIGITS
    where = torch.nonzero(is_used).flatten()
    if not torch.equal(cells[where].sort().values, numbers):
        return None
    places = torch.empty_like(numbers)
    places[cells[where]] = where
    return places.view(2, *shape)
