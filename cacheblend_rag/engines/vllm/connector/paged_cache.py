"""vLLM's paged KV cache in a worker: its layers, groups and metadata builders, and block tables.

KV is written with the attention layer's own function, which knows the cache's layout and its
quantization. Attention backends lay blocks out in their own ways, and a CPU's differ by processor.
So the function writes numbers that are all different; where they are found is the layout in which
KV is read back. Which of the formats with 8 bits a cache has is found out in the same way.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from inspect import signature
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm.v1.worker.utils import select_common_block_size

from cacheblend_rag.blend.fused import FusedKV
from cacheblend_rag.engines.vllm.connector.compatibility import layers_by_spec
from cacheblend_rag.engines.vllm.connector.stack import WRITTEN_AT_ONCE, VLLMStack
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
    tokens per block of the kernels, which divides it. blocks: of the kernels in each layer's cache.
    dtype: of the model. latest: what each builder has built last, by its ``id``, and of what.
    """

    attention: Sequence[Any]
    groups: Sequence[int]
    builders: Sequence[Any]
    block_size: int
    kernel_block_size: int
    blocks: int
    dtype: torch.dtype
    latest: dict[int, tuple[Any, Any]] = field(default_factory=dict)

    @property
    def device(self) -> torch.device:
        """The cache's device."""
        device: torch.device = self.attention[0].kv_cache.device
        return device

    @property
    def group_count(self) -> int:
        """How many KV cache groups there are."""
        return max(self.groups) + 1

    @property
    def is_fast_for_scattered_rows(self) -> bool:
        """Whether scattered rows attend faster by vLLM's kernel than over dense KV.

        To a kernel, scattered rows are many short sequences. On CPUs with AVX-512 that is faster:
        blends at 0.15 take 0.96 s, not 1.12 s, on AMD's and 1.73 s, not 1.90 s, on Intel's (``bench
        ttft --engine vllm``).
        """
        has_avx512 = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
        return self.device.type == "cpu" and has_avx512

    @property
    def most_runs(self) -> float:
        """Most runs of rows in one batch of vLLM's kernel, each a sequence to it.

        Elsewhere than on a CPU builders have room for few. There only runs attend by the kernel.
        """
        return math.inf if self.device.type == "cpu" else 1

    def table(self, block_ids: Sequence[int], tokens: int) -> BlockTable:
        """Return where so many tokens are in these blocks of the allocator."""
        parts = self.block_size // self.kernel_block_size
        ids = np.asarray(block_ids, dtype=np.int32)[:, None] * parts + np.arange(parts)
        return self._table(ids.reshape(-1), tokens)

    def table_of_room(self, tokens: int) -> BlockTable:
        """Return where so many tokens are in a cache of their own (``room``)."""
        return self._table(np.arange(-(-tokens // self.kernel_block_size)), tokens)

    def _table(self, kernel_blocks: NDArray[Any], tokens: int) -> BlockTable:
        blocks = torch.from_numpy(kernel_blocks.astype(np.int32)).to(self.device)
        size, positions = self.kernel_block_size, torch.arange(tokens, device=self.device)
        return BlockTable(blocks, blocks.long()[positions // size] * size + positions % size)

    def first_blocks(self, tokens: int) -> list[range]:
        """Return blocks for so many tokens in each group, none in two groups."""
        each = -(-tokens // self.block_size)
        starts = (1 + group * each for group in range(self.group_count))  # 0 is the null block
        return [range(start, start + each) for start in starts]

    def room(self, layer: int, tokens: int) -> Tensor:
        """Return an empty cache for so many tokens, in a layer's layout."""
        like: Tensor = self.attention[layer].kv_cache
        shape = list(like.shape)
        shape[self._block_axis(like)] = -(-tokens // self.kernel_block_size)
        order = sorted(range(len(shape)), key=like.stride, reverse=True)
        laid_out = like.new_zeros([shape[axis] for axis in order])
        return laid_out.permute([order.index(axis) for axis in range(len(shape))])

    def _block_axis(self, kv_cache: Tensor) -> int:
        """Return the axis of blocks: the first one, unless a backend has keys and values before."""
        sizes = list(kv_cache.shape)
        return sizes.index(self.blocks) if self.blocks in sizes else 0

    def write(self, layer: int, fused: FusedKV, here: slice, into: Tensor, slots: Tensor) -> None:
        """Write a layer's KV of positions ``here`` into a cache of its layout.

        slots: of every position, (tokens,).
        """
        attention, kv = self.attention[layer], fused.of_layer(layer)
        # vLLM's kernel for CPUs takes strided KV. Copying it first pays with smaller numbers only.
        as_views = self.device.type == "cpu" and self.dtype is torch.float32
        most = max(1, here.stop - here.start) if as_views else WRITTEN_AT_ONCE
        for start in range(here.start, here.stop, most):
            part = slice(start, min(start + most, here.stop))
            key, value = (rows[:, part].transpose(0, 1) for rows in kv)
            if not as_views:
                key, value = key.contiguous(), value.contiguous()
            attention.impl.do_kv_cache_update(attention, key, value, into, slots[part])
            del key, value  # before the next part is copied

    @cached_property
    def layouts(self) -> list[BlockLayout] | None:
        """Where a kernel block of each layer keeps its KV, None if that cannot be found out.

        Layers differ if only some are kept in FP8 (--kv-cache-dtype-skip-layers).
        """
        found = [self._layout_of(layer) for layer in range(len(self.attention))]
        known = [layout for layout in found if layout is not None]
        return known if len(known) == len(found) else None

    def _layout_of(self, layer: int) -> BlockLayout | None:
        attention = self.attention[layer]
        shape = (self.kernel_block_size, int(attention.num_kv_heads), int(attention.head_size))
        try:
            return block_layout(attention, self.room(layer, 1), shape, self.dtype)
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
        by_block = attention.kv_cache.movedim(self._block_axis(attention.kv_cache), 0)
        return self.layouts[layer].read(attention, by_block[blocks.long()], self.dtype)


@dataclass(frozen=True)
class BlockTable:
    """Where the tokens of one sequence are in a cache.

    blocks: of the kernels, (kernel blocks,) int32. slots: of each position, (tokens,) int64.
    """

    blocks: Tensor
    slots: Tensor


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
            raise UnsupportedModelError("hybrid model: a KV cache group holds no attention layer")
        kinds = layers_by_spec(group)
        specs = list(kinds)
        block_size = specs[0].block_size
        sizing = (block_size, [backend] * len(specs), specs)
        taken = len(signature(select_common_block_size).parameters)  # vLLM 0.31 takes no specs
        size = select_common_block_size(*sizing[:taken])
        sizes.add(size)
        for spec, names in kinds.items():
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
        blocks=int(kv_cache_config.num_blocks) * (block_size // size),
        dtype=stack.geometry.dtype,
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
