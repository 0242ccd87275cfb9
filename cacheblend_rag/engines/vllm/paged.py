"""PagedKV: one request's share of vLLM's paged KV cache, and attention over it.

Fused KV is written with the attention layer's own function, which knows the cache's layout and
its quantization; nothing is ever read back. Rows may attend over the paged cache too ("native"):
each run of consecutive rows poses as a sequence of its own that shares the request's blocks. That
is bit for bit what vLLM's own prefill computes. Scattered rows make many short runs, so for them
PyTorch's attention over the fused KV is the better choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from vllm.v1.attention.backend import CommonAttentionMetadata

from cacheblend_rag.blend.fused import FusedKV
from cacheblend_rag.blend.passes import attend_fused
from cacheblend_rag.blend.stack import AttentionCall

AttentionMode = Literal["auto", "native", "sdpa"]
LONGEST_MEAN_GAP = 8
"""With ``auto``, rows attend natively when their runs are at least this long on average."""


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
    _metadata: dict[int, tuple[Tensor, Any]] = field(init=False, default_factory=dict)
    _written: dict[int, int] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        device = self.attention[0].kv_cache.device
        positions = torch.arange(self.tokens, device=device)
        self._blocks = torch.tensor(self.block_ids, dtype=torch.int32, device=device)
        self._slots = (
            self._blocks.long()[positions // self.block_size] * self.block_size
            + positions % self.block_size
        )

    def attend(self, call: AttentionCall, fused: FusedKV, rows: Tensor) -> Tensor:
        """Attention for BlendPass; see the module."""
        metadata = self._native_metadata(rows)
        if metadata is None:
            return attend_fused(call, fused, rows)
        layer = self.attention[call.layer]
        if call.layer not in self._written:
            self._write(
                call.layer, fused, torch.arange(self.first, self.tokens, device=rows.device)
            )
            self._written[call.layer] = 0
        else:
            self._write(call.layer, fused, rows[rows >= self.first])
        self._written[call.layer] += rows.numel()
        query = call.query[0].transpose(0, 1).contiguous()
        key, value = (t[0].transpose(0, 1).contiguous() for t in (call.key, call.value))
        output = torch.empty_like(query)
        layer.impl.forward(layer, query, key, value, layer.kv_cache, metadata, output=output)
        return output[None]

    def finish_layer(self, layer: int, fused: FusedKV) -> None:
        """Write a layer whose KV is final, unless native attention has written all of it."""
        if self._written.get(layer, 0) < self.tokens:
            every = torch.arange(self.first, self.tokens, device=self._slots.device)
            self._write(layer, fused, every)

    def _write(self, index: int, fused: FusedKV, rows: Tensor) -> None:
        if rows.numel() == 0:
            return
        layer = self.attention[index]
        key, value = (
            kv[index].index_select(1, rows).transpose(0, 1).contiguous()
            for kv in (fused.keys, fused.values)
        )
        layer.impl.do_kv_cache_update(layer, key, value, layer.kv_cache, self._slots[rows])

    def _native_metadata(self, rows: Tensor) -> Any:
        """Return the backend's metadata for these rows, or None for PyTorch's attention."""
        if self.mode == "sdpa":
            return None
        if id(rows) not in self._metadata:
            self._metadata[id(rows)] = (rows, self._build_metadata(rows))
        return self._metadata[id(rows)][1]

    def _build_metadata(self, rows: Tensor) -> Any:
        breaks = torch.nonzero(rows[1:] != rows[:-1] + 1)[:, 0] + 1
        edges = torch.cat((breaks.new_zeros(1), breaks, breaks.new_full((1,), rows.numel())))
        runs = edges.numel() - 1
        if self.mode == "auto" and runs > 1 and rows.numel() < LONGEST_MEAN_GAP * runs:
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
            slot_mapping=self._slots[rows],
        )
        return self.builder.build(0, common)
