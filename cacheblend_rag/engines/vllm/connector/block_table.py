"""A request's blocks in one of vLLM's KV cache groups, and the slots in which its KV goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from torch import Tensor

from cacheblend_rag.engines.vllm.connector.paged_cache import PagedCache

NULL_BLOCK = 0
"""vLLM's block for tokens that a group keeps nothing of; whatever is in it belongs to nobody."""


@dataclass(frozen=True)
class BlockTable:
    """Where a request's tokens are in one KV cache group.

    blocks: of the kernels, (kernel blocks,) int32. slots: of each position, (tokens,) int64. given:
    the positions whose KV is to be written: vLLM gives no blocks for those before a window.
    native_blocks, native_slots: those that vLLM's attention uses: of the request, or of a separate
    cache if some of the request's are missing. is_whole: whether there are blocks for all tokens.
    is_apart: whether vLLM's attention uses the separate cache.
    """

    blocks: Tensor
    slots: Tensor
    given: slice
    native_blocks: Tensor
    native_slots: Tensor
    is_whole: bool
    is_apart: bool

    @classmethod
    def of(
        cls,
        cache: PagedCache,
        block_ids: Sequence[int],
        first: int,
        tokens: int,
        *,
        attends: bool,
    ) -> Self:
        """Return the table of blocks for tokens [0, tokens), of which [first, tokens) are written.

        attends: whether rows may attend by vLLM's own kernel, which needs all blocks.
        """
        size = cache.block_size
        is_given = np.asarray(block_ids)[np.arange(first, tokens) // size] != NULL_BLOCK
        skipped = int(is_given.argmax()) if is_given.any() else tokens - first
        blocks = cache.kernel_blocks(block_ids)
        slots = _slots(cache, blocks, tokens)
        given = slice(first + skipped, tokens)
        is_whole = NULL_BLOCK not in block_ids[: -(-tokens // size)]
        if is_whole or not attends:
            return cls(blocks, slots, given, blocks, slots, is_whole, is_apart=False)
        own = torch.arange(-(-tokens // cache.kernel_block_size), device=cache.device).int()
        return cls(blocks, slots, given, own, _slots(cache, own, tokens), is_whole, is_apart=True)


def _slots(cache: PagedCache, blocks: Tensor, tokens: int) -> Tensor:
    """Return the slot of each position in these kernel blocks."""
    size = cache.kernel_block_size
    positions = torch.arange(tokens, device=blocks.device)
    return blocks.long()[positions // size] * size + positions % size
