"""vLLM's paged KV cache in a worker: its layers, groups and metadata builders, and block tables."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from inspect import signature
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from vllm.v1.worker.utils import select_common_block_size

from cacheblend_rag.engines.vllm.connector.block_layout import BlockLayout, block_layout
from cacheblend_rag.engines.vllm.connector.kv_groups import layers_by_spec
from cacheblend_rag.engines.vllm.connector.stack import VLLMStack
from cacheblend_rag.errors import UnsupportedModelError
from cacheblend_rag.memory import lack_of_memory
from cacheblend_rag.reason import ReasonCode

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PagedCache:
    """The paged KV cache of a worker, as its attention layers use it.

    attention: vLLM's attention layers. groups: the KV cache group of each; a request has a block
    table per group, and layers of different groups may share memory, of which they use other
    blocks. builders: make the backend's metadata for each layer; layers of one group whose KV cache
    specs are equal share one. block_size: tokens per block of vLLM's allocator. kernel_block_size:
    tokens per block of the kernels, which divides it. dtype: of the model. most_runs: most
    sequences that the builders support; None is without limit.
    """

    attention: Sequence[Any]
    groups: Sequence[int]
    builders: Sequence[Any]
    block_size: int
    kernel_block_size: int
    dtype: torch.dtype
    most_runs: int | None = None

    @property
    def device(self) -> torch.device:
        """The cache's device."""
        device: torch.device = self.attention[0].kv_cache.device
        return device

    def kernel_blocks(self, block_ids: Sequence[int]) -> Tensor:
        """Return the kernels' block ids for allocator blocks, (kernel blocks,) int32."""
        parts = self.block_size // self.kernel_block_size
        blocks = np.asarray(block_ids, dtype=np.int32)[:, None] * parts + np.arange(parts)
        return torch.from_numpy(blocks.astype(np.int32).reshape(-1)).to(self.device)

    def first_blocks(self, tokens: int) -> list[range]:
        """Return blocks for so many tokens in each group, none in two groups."""
        each = -(-tokens // self.block_size)
        starts = (1 + group * each for group in range(self.group_count))  # 0 is the null block
        return [range(start, start + each) for start in starts]

    @property
    def group_count(self) -> int:
        """How many KV cache groups there are."""
        return max(self.groups) + 1

    def own(self, layer: int, blocks: int) -> Tensor:
        """Return an empty cache of so many kernel blocks, in a layer's layout."""
        like: Tensor = self.attention[layer].kv_cache
        shape = [blocks, *like.shape[1:]]
        order = sorted(range(len(shape)), key=like.stride, reverse=True)
        laid_out = like.new_zeros([shape[axis] for axis in order])
        return laid_out.permute([order.index(axis) for axis in range(len(shape))])

    @cached_property
    def layouts(self) -> list[BlockLayout] | None:
        """Where a kernel block of each layer keeps its KV, None if that cannot be found out.

        Layers differ if only some are kept in FP8 (--kv-cache-dtype-skip-layers).
        """
        found: dict[int, BlockLayout | None] = {}
        for layer, builder in enumerate(self.builders):
            if id(builder) not in found:
                found[id(builder)] = self._layout_of(layer)
        each = [found[id(builder)] for builder in self.builders]
        known = [layout for layout in each if layout is not None]
        return known if len(known) == len(each) else None

    def _layout_of(self, layer: int) -> BlockLayout | None:
        attention = self.attention[layer]
        shape = (self.kernel_block_size, int(attention.num_kv_heads), int(attention.head_size))
        try:
            return block_layout(attention, self.own(layer, 1), shape, self.dtype)
        except torch.AcceleratorError:
            raise
        except Exception:  # of a backend that nobody has tried; blends work without it
            logger.debug("the layout of vLLM's KV cache was not found out", exc_info=True)
            return None

    def read(self, layer: int, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Read back a layer's KV in kernel blocks; call it only if ``layouts`` are known.

        Returns:
            Keys and values, each (kv_heads, tokens, head_dim).
        """
        assert self.layouts is not None  # noqa: S101 (see above)
        attention = self.attention[layer]
        return self.layouts[layer].read(attention, attention.kv_cache[blocks.long()], self.dtype)


def paged_cache(vllm_config: Any, kv_cache_config: Any, stack: VLLMStack) -> PagedCache:
    """Return a worker's paged cache, with metadata builders like vLLM's own.

    Raises UnsupportedModelError when layers use several attention backends or kernel block sizes,
    or there is no memory for the backend's workspace.
    """
    backends = {layer.attn_backend for layer in stack.attention}
    if len(backends) != 1:
        raise UnsupportedModelError(
            "layers of this model use several attention backends", ReasonCode.UNSUPPORTED_ATTENTION
        )
    backend = backends.pop()
    device = stack.geometry.device
    builder_of, group_of, sizes = dict[str, Any](), dict[str, int](), set[int]()
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        if not set(stack.names) & set(group.layer_names):
            raise UnsupportedModelError("a KV cache group has none of the model's attention layers")
        kinds = layers_by_spec(group)
        specs = [spec for spec, _ in kinds]
        block_size = specs[0].block_size
        sizing = (block_size, [backend] * len(specs), specs)
        taken = len(signature(select_common_block_size).parameters)  # vLLM 0.31 takes no specs
        size = select_common_block_size(*sizing[:taken])
        sizes.add(size)
        for spec, names in kinds:
            builder = backend.get_builder_cls()(
                spec.copy_with_new_block_size(size), names, vllm_config, device
            )
            builder_of |= dict.fromkeys(names, builder)
            group_of |= dict.fromkeys(names, index)
    if len(sizes) != 1:
        raise UnsupportedModelError(
            "KV cache groups have blocks of different sizes", ReasonCode.UNSUPPORTED_ATTENTION
        )
    builders = [builder_of[name] for name in stack.names]
    share_workspace(builders)
    return PagedCache(
        stack.attention,
        [group_of[name] for name in stack.names],
        builders,
        block_size=block_size,
        kernel_block_size=size,
        dtype=stack.geometry.dtype,
        most_runs=(
            None if device.type == "cpu" else int(vllm_config.scheduler_config.max_num_seqs)
        ),
    )


def share_workspace(builders: Sequence[Any]) -> None:
    """Allocate one FlashInfer workspace buffer, shared by all metadata builders of passes.

    A builder would allocate its own (394 MiB or more) when it first builds metadata. vLLM's memory
    profile does not include it, and a connector cannot reach the builders of vLLM's model runner,
    which have one, too. Allocated at start, it is no longer among the free bytes that passes are
    measured against. Passes run one after another on one stream, as vLLM's own groups do, which
    share one.

    Raises UnsupportedModelError when there is no memory for it.
    """
    first, *others = builders
    if not (hasattr(first, "_get_workspace_buffer") and hasattr(first, "set_workspace_buffer")):
        return
    try:
        workspace = first._get_workspace_buffer()
    except RuntimeError as error:
        if lack_of_memory(error) is None:
            raise
        raise UnsupportedModelError(
            "there is no device memory for the attention backend's workspace: serve with a smaller "
            "--gpu-memory-utilization",
            ReasonCode.NO_ROOM,
        ) from None
    for builder in others:
        builder.set_workspace_buffer(workspace)
    logger.info(
        "the attention backend's workspace takes %d MiB beside vLLM's", workspace.nbytes >> 20
    )


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
