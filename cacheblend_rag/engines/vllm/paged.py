"""PagedKV: one request's share of vLLM's paged KV cache, and attention over it.

Fused KV is written with the attention layer's own function, which knows the cache's layout and
its quantization; nothing is ever read back. Rows may attend over the paged cache too ("native"):
each run of consecutive rows poses as a sequence of its own that shares the request's blocks. That
is bit for bit what vLLM's own prefill computes. Scattered rows make many short runs, for which
PyTorch's attention over the fused KV is the faster choice, but not on CPUs with AVX-512.

Where all layers have a sliding window, vLLM gives a request blocks for the end of its prompt only,
and the null block in place of the others. Then rows attend over a cache of their own, which one
layer after the other uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import CommonAttentionMetadata

from cacheblend_rag.blend.flex import FlexAttention
from cacheblend_rag.blend.fused import FusedKV
from cacheblend_rag.blend.passes import Attention, attend_fused
from cacheblend_rag.blend.stack import AttentionCall
from cacheblend_rag.engines.vllm.serving import AttentionMode

PLAIN: tuple[AttentionMode, ...] = ("sdpa", "flex")
"""Over the fused KV always, by PyTorch."""

NULL_BLOCK = 0
NATIVE_RUN = 8
"""With ``auto``, rows attend natively when their runs are at least this long on average."""
NATIVE_RUN_AVX512 = 1
"""The same on CPUs with AVX-512, where vLLM's kernel takes two thirds of PyTorch's time even for
single rows (``bench ttft --engine vllm --attention``)."""


@dataclass
class PagedKV:
    """Where a request's tokens [first, tokens) are to be written.

    attention: vLLM's attention layers. builder: of the backend's metadata. block_ids: the request's
    blocks, in order. first: tokens before it stand in the cache already.
    """

    attention: Sequence[Any]
    builder: Any
    block_ids: Sequence[int]
    block_size: int
    first: int
    tokens: int
    mode: AttentionMode = "auto"
    _plain: Attention = field(init=False)
    _metadata: dict[int, tuple[Tensor, Any]] = field(init=False, default_factory=dict)
    _in_cache: set[int] = field(init=False, default_factory=set)

    def __post_init__(self) -> None:
        self._plain = FlexAttention() if self.mode == "flex" else attend_fused
        device = self.attention[0].kv_cache.device
        blocks = torch.tensor(self.block_ids, dtype=torch.int32, device=device)
        block_of = blocks[torch.arange(self.tokens, device=device) // self.block_size]
        self._slots = self._slots_in(blocks)
        given = (block_of[self.first :] != NULL_BLOCK).nonzero()[:, 0]
        skipped = int(given[0]) if given.numel() else self.tokens - self.first
        self._given = slice(self.first + skipped, self.tokens)
        self._own: Tensor | None = None
        if bool((block_of == NULL_BLOCK).any()) and self.mode not in PLAIN:
            blocks = torch.arange(-(-self.tokens // self.block_size), device=device).int()
            self._own = _cache_of(self.attention[0], blocks.numel())
        self._blocks, self._native_slots = blocks, self._slots_in(blocks)

    def _slots_in(self, blocks: Tensor) -> Tensor:
        """Return the slot, (tokens,) int64, of each position in these blocks."""
        positions = torch.arange(self.tokens, device=blocks.device)
        first = blocks.long()[positions // self.block_size] * self.block_size
        return first + positions % self.block_size

    def attend(self, call: AttentionCall, fused: FusedKV, rows: Tensor) -> Tensor:
        """Attention for BlendPass; see the module."""
        metadata = self._native_metadata(rows)
        if metadata is None:
            self._in_cache.discard(call.layer)
            return self._plain(call, fused, rows)
        layer = self.attention[call.layer]
        cache = layer.kv_cache if self._own is None else self._own
        first = self.first if self._own is None else 0
        is_there = call.layer in self._in_cache
        wanted = rows[rows >= first] if is_there else slice(first, self.tokens)
        self._write(call.layer, fused, wanted, cache, self._native_slots)
        self._in_cache.add(call.layer)
        query = call.query[0].transpose(0, 1).contiguous()
        key, value = (t[0].transpose(0, 1).contiguous() for t in (call.key, call.value))
        output = torch.empty_like(query)
        layer.impl.forward(layer, query, key, value, cache, metadata, output=output)
        return output[None]

    def finish_layer(self, layer: int, fused: FusedKV) -> None:
        """Write a layer whose KV is final, unless native attention has written all of it.

        It writes a layer whole at first, and then the fresh rows it is called for.
        """
        if self._own is not None or layer not in self._in_cache:
            self._write(layer, fused, self._given, self.attention[layer].kv_cache, self._slots)

    def _write(
        self, index: int, fused: FusedKV, rows: Tensor | slice, cache: Tensor, slots: Tensor
    ) -> None:
        into = slots[rows]
        if into.numel() == 0:
            return
        layer = self.attention[index]
        key, value = (
            kv[index][:, rows].transpose(0, 1).contiguous() for kv in (fused.keys, fused.values)
        )
        layer.impl.do_kv_cache_update(layer, key, value, cache, into)

    def _native_metadata(self, rows: Tensor) -> Any:
        """Return the backend's metadata for these rows, or None for PyTorch's attention."""
        if self.mode in PLAIN:
            return None
        if id(rows) not in self._metadata:
            self._metadata[id(rows)] = (rows, self._build_metadata(rows))
        return self._metadata[id(rows)][1]

    def _build_metadata(self, rows: Tensor) -> Any:
        breaks = torch.nonzero(rows[1:] != rows[:-1] + 1)[:, 0] + 1
        edges = torch.cat((breaks.new_zeros(1), breaks, breaks.new_full((1,), rows.numel())))
        runs = edges.numel() - 1
        if self.mode == "auto" and runs > 1 and rows.numel() < _native_run(rows.device) * runs:
            return None
        ends = (rows[edges[1:] - 1] + 1).int()
        starts = edges.int()
        common = CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts.cpu(),
            seq_lens=ends,
            num_reqs=runs,
            num_actual_tokens=rows.numel(),
            max_query_len=int((starts[1:] - starts[:-1]).max()),
            max_seq_len=int(ends.max()),
            block_table_tensor=self._blocks[None].expand(runs, -1).contiguous(),
            slot_mapping=self._native_slots[rows],
        )
        return self.builder.build(0, common)


def _native_run(device: torch.device) -> int:
    avx512 = torch.backends.cpu.get_cpu_capability().startswith("AVX512")
    return NATIVE_RUN_AVX512 if device.type == "cpu" and avx512 else NATIVE_RUN


def _cache_of(layer: Any, blocks: int) -> Tensor:
    """Return an empty cache of so many blocks, laid out as the layer's own; blocks come first."""
    shape = [blocks, *layer.kv_cache.shape[1:]]
    order = sorted(range(len(shape)), key=layer.kv_cache.stride, reverse=True)
    laid_out: Tensor = layer.kv_cache.new_zeros([shape[axis] for axis in order])
    return laid_out.permute([order.index(axis) for axis in range(len(shape))])
