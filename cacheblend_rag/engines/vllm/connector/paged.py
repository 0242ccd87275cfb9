"""Writes one request's KV into vLLM's paged KV cache, and attends over it.

Fused KV is written with the attention layer's own function, which knows the cache's layout and its
quantization. Only the KV of a prefix that vLLM's prefix cache holds is read back, in the layout and
format that this function was seen to write. Rows may attend over the paged cache too ("native"):
each run of consecutive rows is passed as a sequence of its own that shares the request's blocks.
That equals vLLM's own prefill bit for bit. Scattered rows make many short runs, for which attention
over the dense fused KV (`RowAttention`) is faster, except on CPUs with AVX-512; rows whose blocks
are shared with ordinary requests are left out of that.

If all layers have a sliding window, vLLM gives a request blocks for the end of its prompt only,
and the null block in place of the others. Then rows attend over a separate cache, which all layers
use in turn.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from inspect import signature
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs
from vllm.v1.worker.utils import select_common_block_size

from cacheblend_rag.blend.flex import FlexAttention
from cacheblend_rag.blend.fused import FusedKV
from cacheblend_rag.blend.passes import Attention
from cacheblend_rag.blend.row_attention import RowAttention
from cacheblend_rag.blend.rows import Positions, Rows
from cacheblend_rag.blend.stack import AttentionCall
from cacheblend_rag.engines.vllm.connector.block_layout import BlockLayout, block_layout
from cacheblend_rag.engines.vllm.connector.settings import PLAIN, AttentionMode
from cacheblend_rag.engines.vllm.connector.stack import WRITTEN_AT_ONCE, VLLMStack
from cacheblend_rag.errors import UnsupportedModelError
from cacheblend_rag.prefill.prompt_pass import HeldPrefix
from cacheblend_rag.reason import ReasonCode

logger = logging.getLogger(__name__)

NULL_BLOCK = 0
NATIVE_RUN = 8
"""With ``auto``, rows attend natively when their runs are at least this long on average."""
NATIVE_RUN_AVX512 = 1
"""The same on CPUs with AVX-512, where vLLM's kernel takes two thirds of PyTorch's time even for
single rows (``bench ttft --engine vllm --attention``)."""


@dataclass(frozen=True)
class PagedCache:
    """The paged KV cache of a worker, as its attention layers use it.

    attention: vLLM's attention layers. builder: makes the backend's metadata. block_size: tokens
    per block of vLLM's allocator. kernel_block_size: tokens per block of the kernels, which divides
    it. dtype: of the model. most_runs: most sequences that the builder supports; None is without
    limit.
    """

    attention: Sequence[Any]
    builder: Any
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

    def own(self, blocks: int) -> Tensor:
        """Return an empty cache of so many kernel blocks, in the first layer's layout."""
        like: Tensor = self.attention[0].kv_cache
        shape = [blocks, *like.shape[1:]]
        order = sorted(range(len(shape)), key=like.stride, reverse=True)
        laid_out = like.new_zeros([shape[axis] for axis in order])
        return laid_out.permute([order.index(axis) for axis in range(len(shape))])

    @cached_property
    def layout(self) -> BlockLayout | None:
        """Where a kernel block keeps its KV, None if that cannot be found out."""
        first = self.attention[0]
        shape = (self.kernel_block_size, int(first.num_kv_heads), int(first.head_size))
        try:
            return block_layout(first, self.own(1), shape, self.dtype)
        except torch.AcceleratorError:
            raise
        except Exception:  # of a backend that nobody has tried; blends work without it
            logger.debug("the layout of vLLM's KV cache was not found out", exc_info=True)
            return None

    def read(self, layer: int, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Read back a layer's KV in kernel blocks; call it only if ``layout`` is known.

        Returns:
            Keys and values, each (kv_heads, tokens, head_dim).
        """
        assert self.layout is not None  # noqa: S101 (see above)
        attention = self.attention[layer]
        return self.layout.read(attention, attention.kv_cache[blocks.long()], self.dtype)


def paged_cache(vllm_config: Any, kv_cache_config: Any, stack: VLLMStack) -> PagedCache:
    """Return a worker's paged cache, with a metadata builder like vLLM's own."""
    backends = {layer.attn_backend for layer in stack.attention}
    if len(backends) != 1:
        raise UnsupportedModelError(
            "layers of this model use several attention backends", ReasonCode.UNSUPPORTED_ATTENTION
        )
    backend = backends.pop()
    spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        spec = spec.kv_cache_specs[stack.names[0]]
    sizing = (spec.block_size, [backend], [spec])
    taken = len(signature(select_common_block_size).parameters)  # vLLM 0.31 takes no specs
    size = select_common_block_size(*sizing[:taken])
    device = stack.geometry.device
    builder = backend.get_builder_cls()(
        spec.copy_with_new_block_size(size), stack.names, vllm_config, device
    )
    return PagedCache(
        stack.attention,
        builder,
        block_size=spec.block_size,
        kernel_block_size=size,
        dtype=stack.geometry.dtype,
        most_runs=(
            None if device.type == "cpu" else int(vllm_config.scheduler_config.max_num_seqs)
        ),
    )


@dataclass
class PagedKV:
    """The destination of a request's tokens [first, tokens).

    block_ids: the request's blocks, in order. first: tokens before it are in the cache already.
    shared: tokens in the first blocks, whose KV vLLM's prefix cache may give to ordinary requests:
    unless ``mode`` says otherwise, their rows attend natively, as in vLLM's own prefill.
    """

    cache: PagedCache
    block_ids: Sequence[int]
    first: int
    tokens: int
    mode: AttentionMode = "auto"
    shared: int = 0
    _plain: Attention = field(init=False)
    _runs: dict[int, tuple[Rows, list[tuple[slice, CommonAttentionMetadata]]]] = field(
        init=False, default_factory=dict
    )
    _built: tuple[CommonAttentionMetadata, Any] | None = field(init=False, default=None)
    _in_cache: set[int] = field(init=False, default_factory=set)
    _splits: dict[int, tuple[Rows, Rows, Rows]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        is_flex, kernels = self.mode == "flex", self.mode != "sdpa"
        self._plain = FlexAttention() if is_flex else RowAttention(kernels=kernels)
        blocks = self.cache.kernel_blocks(self.block_ids)
        size = self.cache.block_size
        given = np.asarray(self.block_ids)[np.arange(self.first, self.tokens) // size] != NULL_BLOCK
        skipped = int(given.argmax()) if given.any() else self.tokens - self.first
        self._given = slice(self.first + skipped, self.tokens)
        self.slots = self._slots_in(blocks)
        self._own: Tensor | None = None
        if NULL_BLOCK in self.block_ids[: -(-self.tokens // size)] and self.mode not in PLAIN:
            count = -(-self.tokens // self.cache.kernel_block_size)
            blocks = torch.arange(count, device=self.cache.device).int()
            self._own = self.cache.own(count)
        self._blocks, self._native_slots = blocks, self._slots_in(blocks)

    def _slots_in(self, blocks: Tensor) -> Tensor:
        """Return the slot, (tokens,) int64, of each position in these kernel blocks."""
        size = self.cache.kernel_block_size
        positions = torch.arange(self.tokens, device=blocks.device)
        return blocks.long()[positions // size] * size + positions % size

    def attend(self, call: AttentionCall, fused: FusedKV, rows: Rows) -> Tensor:
        """Attention for BlendPass; see the module."""
        layer = self.cache.attention[call.layer]
        cache = layer.kv_cache if self._own is None else self._own
        first = self.first if self._own is None else 0
        if not self.is_native(rows):
            self._in_cache.discard(call.layer)
            leading, others = self._split(rows)
            if not len(leading):
                return self._plain(call, fused, rows)
            self._write(call.layer, fused, slice(first, self.shared), cache, self._native_slots)
            exact = self._attend_natively(_part(call, 0, len(leading)), cache, leading)
            other = self._plain(_part(call, len(leading), len(rows)), fused, others)
            return torch.cat((exact, other), 1)
        if call.layer in self._in_cache:
            fresh = rows.part(int(np.searchsorted(rows.host, first)), len(rows))
            self._write(call.layer, fused, fresh.device, cache, self._native_slots)
        else:
            self._write(call.layer, fused, slice(first, self.tokens), cache, self._native_slots)
        self._in_cache.add(call.layer)
        return self._attend_natively(call, cache, rows)

    def _split(self, rows: Rows) -> tuple[Rows, Rows]:
        """Return the rows whose blocks are shared, and the others."""
        if id(rows) not in self._splits:
            count = 0 if self.mode in PLAIN else int(np.searchsorted(rows.host, self.shared))
            parts = rows.part(0, count), rows.part(count, len(rows))
            self._splits[id(rows)] = (rows, *parts)  # kept, as in ``common``
        return self._splits[id(rows)][1:]

    def prefix(self, tokens: int) -> HeldPrefix | None:
        """Return the KV of so many first tokens, of whole blocks that are in the cache already.

        None if there are none, or if they cannot be read back.
        """
        if not tokens or self._own is not None or self.cache.layout is None:
            return None
        size = self.cache.kernel_block_size
        blocks = self._blocks[: tokens // size]

        def place(layer: int, fused: FusedKV) -> None:
            start = 0
            for part in torch.split(blocks, max(1, WRITTEN_AT_ONCE // size)):
                fused.place(layer, start, *self.cache.read(layer, part), None)
                start += len(part) * size

        return HeldPrefix(tokens, place)

    def finish_layer(self, layer: int, fused: FusedKV) -> None:
        """Write a layer whose KV is final, unless native attention has written all of it.

        Native attention writes a layer whole on its first call, and then the fresh rows.
        """
        if self._own is not None or layer not in self._in_cache:
            cache = self.cache.attention[layer].kv_cache
            self._write(layer, fused, self._given, cache, self.slots)

    def forget(self) -> None:
        """Write all layers whole again, since the pass starts again."""
        self._in_cache.clear()

    def run(self, rows: Rows) -> tuple[Any, Tensor]:
        """Return the backend's metadata for rows that are one run, and the slots of their KV."""
        ((_, common),) = self.common(rows)
        return self._build(common), self._native_slots[rows.device]

    def is_native(self, rows: Rows) -> bool:
        """Whether these rows attend by vLLM's own kernel."""
        if self.mode != "auto":
            return self.mode not in PLAIN
        if rows.is_run:
            return True
        runs = len(_edges(rows.host)) - 1
        return len(rows) >= _native_run(self.cache.device) * runs

    def _attend_natively(self, call: AttentionCall, cache: Tensor, rows: Rows) -> Tensor:
        layer = self.cache.attention[call.layer]
        query, key, value = (
            part[0].transpose(0, 1).contiguous() for part in (call.query, call.key, call.value)
        )
        output = torch.empty_like(query)
        if getattr(layer, "query_quant", None) is not None:  # such a kernel takes it quantized
            query = layer.query_quant(query.flatten(1), layer._q_scale)[0].view_as(query)
        for here, common in self.common(rows):
            metadata = self._build(common)
            parts = (query[here], key[here], value[here])
            layer.impl.forward(layer, *parts, cache, metadata, output=output[here])
        return output[None]

    def _build(self, common: CommonAttentionMetadata) -> Any:
        """Return the backend's metadata; only the latest are kept.

        Builders may return views of one buffer, which the next call overwrites.
        """
        if self._built is None or self._built[0] is not common:
            fast = self.cache.device.type != "cpu"
            self._built = (common, self.cache.builder.build(0, common, fast_build=fast))
        return self._built[1]

    def common(self, rows: Rows) -> list[tuple[slice, CommonAttentionMetadata]]:
        """Return vLLM's common metadata for parts of the rows, each as one batch of sequences."""
        if id(rows) not in self._runs:
            edges = _edges(rows.host)
            most = self.cache.most_runs or len(edges)
            starts = range(0, len(edges) - 1, most)
            parts = [edges[start : start + most + 1] for start in starts]
            # the rows are kept too, so that Python does not reuse their id for other rows
            made = [(slice(int(p[0]), int(p[-1])), self._batch(rows, p)) for p in parts]
            self._runs[id(rows)] = (rows, made)
        return self._runs[id(rows)][1]

    def _batch(self, rows: Rows, edges: Positions) -> CommonAttentionMetadata:
        """Return the metadata of runs of rows, as sequences of one request."""
        device = self.cache.device
        starts = (edges - edges[0]).astype(np.int32)
        ends = (rows.host[edges[1:] - 1] + 1).astype(np.int32)
        starts_cpu, ends_cpu = torch.from_numpy(starts), torch.from_numpy(ends)
        here = rows.part(int(edges[0]), int(edges[-1]))
        return CommonAttentionMetadata(
            query_start_loc=starts_cpu.to(device),
            query_start_loc_cpu=starts_cpu,
            seq_lens=ends_cpu.to(device),
            seq_lens_cpu_upper_bound=ends_cpu,  # exact: builders need not ask the device
            num_reqs=len(ends),
            num_actual_tokens=len(here),
            max_query_len=int(np.diff(starts).max()),
            max_seq_len=int(ends.max()),
            block_table_tensor=self._blocks[None].expand(len(ends), -1).contiguous(),
            slot_mapping=self._native_slots[here.device],
        )

    def _write(
        self, index: int, fused: FusedKV, rows: Tensor | slice, cache: Tensor, slots: Tensor
    ) -> None:
        layer = self.cache.attention[index]
        keys, values = fused.of_layer(index)
        for part in _parts(rows):
            into = slots[part]
            if into.numel():
                key, value = (kv[:, part].transpose(0, 1).contiguous() for kv in (keys, values))
                layer.impl.do_kv_cache_update(layer, key, value, cache, into)
                del key, value  # before the next part is copied


def _part(call: AttentionCall, start: int, stop: int) -> AttentionCall:
    """Return the call for the rows with indices ``start`` to ``stop`` - 1."""
    own = {name: getattr(call, name)[:, :, start:stop] for name in ("query", "key", "value")}
    return replace(call, **own)


def _parts(rows: Tensor | slice) -> Iterator[Tensor | slice]:
    """Split rows into parts whose copies need little memory."""
    if isinstance(rows, slice):
        for start in range(rows.start, rows.stop, WRITTEN_AT_ONCE):
            yield slice(start, min(start + WRITTEN_AT_ONCE, rows.stop))
    else:
        yield from torch.split(rows, WRITTEN_AT_ONCE)


def _edges(positions: Positions) -> Positions:
    """Return the starts of runs of consecutive positions, and the end of the last run."""
    breaks = np.flatnonzero(np.diff(positions) != 1) + 1
    return np.concatenate(([0], breaks, [len(positions)]))


def _native_run(device: torch.device) -> float:
    """Return the least average length of runs for the native kernel.

    On an accelerator many runs behave like decoding, for which attention over dense KV is faster.
    """
    if device.type != "cpu":
        return float("inf")
    avx512 = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    return NATIVE_RUN_AVX512 if avx512 else NATIVE_RUN
