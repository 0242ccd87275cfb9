"""Writes one request's KV into vLLM's paged KV cache, and attends over it.

Fused KV is written with the attention layer's own function, which knows the cache's layout and its
quantization. Only the KV of a prefix that vLLM's prefix cache holds is read back, in the layout and
format that this function was seen to write. Rows may attend over the paged cache too ("native"):
each run of consecutive rows is passed as a sequence of its own that shares the request's blocks.
That equals vLLM's own prefill bit for bit. Scattered rows make many short runs, for which attention
over the dense fused KV (`RowAttention`) is faster, except on CPUs with AVX-512; rows whose blocks
are shared with ordinary requests are left out of that.

Layers belong to KV cache groups, each with a block table of its own (`BlockTable`). To layers with
a sliding window vLLM may give blocks for the end of a prompt only, and the null block in place of
the others. Then their rows attend over a separate cache, which all such layers use in turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from vllm.v1.attention.backend import CommonAttentionMetadata

from cacheblend_rag.blend.fused import FusedKV
from cacheblend_rag.blend.row_attention import RowAttention
from cacheblend_rag.blend.rows import Positions, Rows
from cacheblend_rag.blend.stack import AttentionCall
from cacheblend_rag.engines.vllm.connector.paged_cache import BlockTable, PagedCache
from cacheblend_rag.engines.vllm.connector.stack import WRITTEN_AT_ONCE
from cacheblend_rag.prefill.prompt_pass import HeldPrefix

AttentionMode = Literal["auto", "native", "sdpa"]
"""How rows attend: by vLLM's own kernel (native), over the fused KV (sdpa), or by either."""

NATIVE_RUN = 8
"""With ``auto``, rows attend natively when their runs are at least this long on average."""
NATIVE_RUN_AVX512 = 1
"""The same on CPUs with AVX-512, where vLLM's kernel is faster than `RowAttention` even for single
rows: blends at 0.15 take 0.96 s, not 1.12 s, on AMD's and 1.73 s, not 1.90 s, on Intel's (``bench
ttft --engine vllm``)."""


@dataclass
class PagedKV:
    """The destination of a request's tokens [first, tokens).

    block_ids: the request's blocks in each KV cache group, in order. first: tokens before it are in
    the cache already. shared: tokens in the first blocks, whose KV vLLM's prefix cache may give to
    ordinary requests: unless ``mode`` says otherwise, their rows attend natively, as in vLLM's own
    prefill. tables: of the groups.
    """

    cache: PagedCache
    block_ids: Sequence[Sequence[int]]
    first: int
    tokens: int
    mode: AttentionMode = "auto"
    shared: int = 0
    tables: list[BlockTable] = field(init=False)
    _plain: RowAttention = field(init=False)
    _runs: dict[tuple[int, int], tuple[Rows, list[tuple[slice, CommonAttentionMetadata]]]] = field(
        init=False, default_factory=dict
    )
    _built: dict[int, tuple[CommonAttentionMetadata, Any]] = field(init=False, default_factory=dict)
    _own: dict[torch.dtype, Tensor] = field(init=False, default_factory=dict)
    _in_cache: dict[int, int] = field(init=False, default_factory=dict)
    _splits: dict[int, tuple[Rows, Rows, Rows]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        may_be_native = self.mode != "sdpa"
        self._plain = RowAttention(kernels=may_be_native)
        self.tables = [
            BlockTable.of(self.cache, blocks, self.first, self.tokens, attends=may_be_native)
            for blocks in self.block_ids
        ]

    def _cache_of(self, layer: int) -> Tensor:
        """Return the cache over which a layer's rows attend natively: vLLM's, or a separate one."""
        cache: Tensor = self.cache.attention[layer].kv_cache
        if not self.tables[self.cache.groups[layer]].is_apart:
            return cache
        if cache.dtype not in self._own:
            blocks = -(-self.tokens // self.cache.kernel_block_size)
            self._own[cache.dtype] = self.cache.own(layer, blocks)
        return self._own[cache.dtype]

    @property
    def own_caches(self) -> int:
        """How many separate caches layers attend over, each of one layer's KV: one a dtype."""
        layers = zip(self.cache.attention, self.cache.groups, strict=True)
        return len({one.kv_cache.dtype for one, group in layers if self.tables[group].is_apart})

    def attend(self, call: AttentionCall, fused: FusedKV, rows: Rows) -> Tensor:
        """Attention for BlendPass; see the module."""
        table = self.tables[self.cache.groups[call.layer]]
        cache = self._cache_of(call.layer)
        first = 0 if table.is_apart else self.first
        if not self.is_native(rows):
            self._in_cache.pop(call.layer, None)
            leading, others = self._split(rows)
            if not len(leading):
                return self._plain(call, fused, rows)
            shared = slice(first, leading.last + 1)
            self._write(call.layer, fused, shared, cache, table.native_slots)
            exact = self._attend_natively(call.part(0, len(leading)), cache, leading)
            other = self._plain(call.part(len(leading), len(rows)), fused, others)
            return torch.cat((exact, other), 1)
        self._write_until(rows, call.layer, fused, cache, first)
        return self._attend_natively(call, cache, rows)

    def _write_until(
        self, rows: Rows, layer: int, fused: FusedKV, cache: Tensor, first: int
    ) -> None:
        """Write a layer's KV that vLLM's cache lacks, up to the last of these rows.

        Not further: KV of later rows may not have been computed, and kernels read a block of the
        cache to its end, where masked numbers must be finite.
        """
        slots = self.tables[self.cache.groups[layer]].native_slots
        done = self._in_cache.get(layer, first)
        fresh = rows.part(*np.searchsorted(rows.host, (first, done)).tolist())
        self._write(layer, fused, fresh.device, cache, slots)
        self._write(layer, fused, slice(done, rows.last + 1), cache, slots)
        self._in_cache[layer] = max(done, rows.last + 1)

    def _split(self, rows: Rows) -> tuple[Rows, Rows]:
        """Return the rows whose blocks are shared, and the others."""
        if id(rows) not in self._splits:
            count = 0 if self.mode == "sdpa" else int(np.searchsorted(rows.host, self.shared))
            parts = rows.part(0, count), rows.part(count, len(rows))
            self._splits[id(rows)] = (rows, *parts)  # kept, as in ``common``
        return self._splits[id(rows)][1:]

    def prefix(self, tokens: int) -> HeldPrefix | None:
        """Return the KV of so many first tokens, of whole blocks that are in the cache already.

        None if there are none, or if they cannot be read back.
        """
        is_held = tokens > 0 and all(table.is_whole for table in self.tables)
        if not is_held or self.cache.layouts is None:
            return None
        size = self.cache.kernel_block_size

        def place(layer: int, fused: FusedKV) -> None:
            blocks = self.tables[self.cache.groups[layer]].blocks[: tokens // size]
            start = 0
            for part in torch.split(blocks, max(1, WRITTEN_AT_ONCE // size)):
                fused.place(layer, start, *self.cache.read(layer, part), None)
                start += len(part) * size

        return HeldPrefix(tokens, place)

    def finish_layer(self, layer: int, fused: FusedKV) -> None:
        """Write a layer's final KV to vLLM's cache, without the tokens written before."""
        table = self.tables[self.cache.groups[layer]]
        if table.is_apart or layer not in self._in_cache:
            given = table.given
        else:
            given = slice(self._in_cache[layer], self.tokens)
        cache = self.cache.attention[layer].kv_cache
        self._write(layer, fused, given, cache, table.slots)

    def forget(self) -> None:
        """Write all layers whole again, since the pass starts again."""
        self._in_cache.clear()

    def run(self, rows: Rows) -> list[tuple[Any, Tensor]]:
        """Return each layer's metadata for rows that are one run, and the slots of their KV."""
        made: list[tuple[Any, Tensor]] = []
        for layer, group in enumerate(self.cache.groups):
            ((_, common),) = self.common(rows, group)
            slots = self.tables[group].native_slots[rows.device]
            made.append((self._build(common, layer), slots))
        return made

    def is_native(self, rows: Rows) -> bool:
        """Whether these rows attend by vLLM's own kernel."""
        if self.mode != "auto":
            return self.mode == "native"
        if rows.is_run:
            return True
        runs = len(_edges(rows.host)) - 1
        return len(rows) >= _native_run(self.cache.device) * runs

    def _attend_natively(self, call: AttentionCall, cache: Tensor, rows: Rows) -> Tensor:
        layer, group = self.cache.attention[call.layer], self.cache.groups[call.layer]
        query, key, value = (
            part[0].transpose(0, 1).contiguous() for part in (call.query, call.key, call.value)
        )
        output = torch.empty_like(query)
        if getattr(layer, "query_quant", None) is not None:  # such a kernel takes it quantized
            query = layer.query_quant(query.flatten(1), layer._q_scale)[0].view_as(query)
        for here, common in self.common(rows, group):
            metadata = self._build(common, call.layer)
            parts = (query[here], key[here], value[here])
            layer.impl.forward(layer, *parts, cache, metadata, output=output[here])
        return output[None]

    def _build(self, common: CommonAttentionMetadata, layer: int) -> Any:
        """Return the backend's metadata for a layer; only the latest of each builder are kept.

        Builders may return views of one buffer, which the next call overwrites.
        """
        builder = self.cache.builders[layer]
        if id(builder) not in self._built or self._built[id(builder)][0] is not common:
            fast = self.cache.device.type != "cpu"
            made = builder.build(0, common, fast_build=fast)
            self._built[id(builder)] = (common, made)
        return self._built[id(builder)][1]

    def common(self, rows: Rows, group: int) -> list[tuple[slice, CommonAttentionMetadata]]:
        """Return vLLM's common metadata of a KV cache group, for parts of the rows.

        Each part is one batch of sequences.
        """
        key = (group, id(rows))
        if key not in self._runs:
            edges = _edges(rows.host)
            most = self.cache.most_runs or len(edges)
            starts = range(0, len(edges) - 1, most)
            parts = [edges[start : start + most + 1] for start in starts]
            # the rows are kept too, so that Python does not reuse their id for other rows
            table = self.tables[group]
            made = [(slice(int(p[0]), int(p[-1])), self._batch(rows, p, table)) for p in parts]
            self._runs[key] = (rows, made)
        return self._runs[key][1]

    def _batch(self, rows: Rows, edges: Positions, table: BlockTable) -> CommonAttentionMetadata:
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
            block_table_tensor=table.native_blocks[None].expand(len(ends), -1).contiguous(),
            slot_mapping=table.native_slots[here.device],
        )

    def _write(
        self, index: int, fused: FusedKV, rows: Tensor | slice, cache: Tensor, slots: Tensor
    ) -> None:
        layer = self.cache.attention[index]
        keys, values = fused.of_layer(index)
        # vLLM's kernel for CPUs takes strided KV. Copying it first pays with smaller numbers only.
        as_views = keys.device.type == "cpu" and keys.dtype is torch.float32
        for part in [rows] if as_views else _parts(rows):
            into = slots[part]
            if into.numel():
                key, value = (kv[:, part].transpose(0, 1) for kv in (keys, values))
                if not as_views:
                    key, value = key.contiguous(), value.contiguous()
                layer.impl.do_kv_cache_update(layer, key, value, cache, into)
                del key, value  # before the next part is copied


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
