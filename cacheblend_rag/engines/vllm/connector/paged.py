"""One request's part of vLLM's paged KV cache, and how the rows of its pass attend.

`PagedKV` writes fused KV into the request's blocks, and reads the KV of a prefix that vLLM's prefix
cache holds. `PagedAttention` needs none of these blocks: it lets rows attend by vLLM's own kernel
over a cache of one layer, which each layer's fused KV is written into before. That equals vLLM's
own prefill bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from vllm.v1.attention.backend import CommonAttentionMetadata

from cacheblend_rag.blend.fused import FusedKV, RingKV
from cacheblend_rag.blend.passes import Attention
from cacheblend_rag.blend.row_attention import RowAttention
from cacheblend_rag.blend.rows import Positions, Rows
from cacheblend_rag.blend.stack import AttentionCall, Geometry
from cacheblend_rag.engines.vllm.connector.paged_cache import BlockTable, PagedCache
from cacheblend_rag.engines.vllm.connector.stack import WRITTEN_AT_ONCE
from cacheblend_rag.prefill.prompt_pass import Destination

NULL_BLOCK = 0
"""vLLM's block for tokens that a group keeps nothing of; whatever is in it belongs to nobody."""


class PagedKV(Destination):
    """The destination of a request's tokens [first, tokens).

    block_ids: the request's blocks in each KV cache group, in order. To a group of layers with a
    sliding window vLLM may give blocks for the end of a prompt only, and the null block in place of
    the others: nothing is written there. first: tokens before it are in the cache already.
    attention: how the rows of a pass over these tokens attend.
    """

    def __init__(
        self,
        cache: PagedCache,
        block_ids: Sequence[Sequence[int]],
        first: int,
        tokens: int,
        attention: Attention | None = None,
    ) -> None:
        super().__init__(needs_hidden=False, until=tokens, attention=attention)
        self.cache, self.block_ids = cache, block_ids
        self.tables = [cache.table(blocks, tokens) for blocks in block_ids]
        self._given = [self._with_blocks(blocks, first, tokens) for blocks in block_ids]

    def _with_blocks(self, blocks: Sequence[int], first: int, tokens: int) -> slice:
        """Return the positions whose KV is to be written: from the first one that has a block."""
        in_block = np.arange(first, tokens) // self.cache.block_size
        given = np.flatnonzero(np.asarray(blocks)[in_block] != NULL_BLOCK)
        return slice(first + int(given[0]) if len(given) else tokens, tokens)

    def buffer(self, geometry: Geometry, tokens: int) -> RingKV:
        """Return a ring: each layer goes to vLLM's cache once it is final."""
        return RingKV(geometry, tokens)

    def finish_layer(self, layer: int, fused: FusedKV) -> None:
        """Write a layer's final KV to vLLM's cache."""
        group, into = self.cache.groups[layer], self.cache.attention[layer].kv_cache
        self.cache.write(layer, fused, self._given[group], into, self.tables[group].slots)

    def holding(self, tokens: int) -> Self:
        """Have so many first tokens, of whole blocks, read from the cache; returns this object.

        None are read if they cannot be read back.
        """
        count = tokens // self.cache.block_size
        is_there = all(NULL_BLOCK not in ids[:count] for ids in self.block_ids)
        self.held_tokens = tokens if is_there and self.cache.layouts is not None else 0
        return self

    def place_held(self, layer: int, fused: FusedKV) -> None:
        """Read one layer of the held tokens' KV from vLLM's cache."""
        size, start = self.cache.kernel_block_size, 0
        blocks = self.tables[self.cache.groups[layer]].blocks[: self.held_tokens // size]
        for part in torch.split(blocks, max(1, WRITTEN_AT_ONCE // size)):
            fused.place(layer, start, *self.cache.read(layer, part), None)
            start += len(part) * size

    def metadata(self, rows: Rows) -> list[tuple[Any, Tensor]]:
        """Return each layer's metadata for rows that are one run, and the slots of their KV."""
        found: list[tuple[Any, Tensor]] = []
        of_groups = [Metadata(self.cache, table) for table in self.tables]
        for layer, group in enumerate(self.cache.groups):
            ((_, made),) = of_groups[group].of(layer, rows)
            found.append((made, self.tables[group].slots[rows.device]))
        return found


NOTHING = (-1, 0)
"""The layer whose KV was written last, and how many of its first tokens: none yet."""


class PagedAttention:
    """An `Attention` for one pass over the first ``tokens`` of a prompt.

    Runs of rows attend natively, by vLLM's kernel. Scattered rows attend over dense KV
    (`RowAttention`) where that is faster, except those before ``exact``: vLLM gives their blocks to
    ordinary requests.
    """

    def __init__(self, cache: PagedCache, tokens: int, exact: int = 0) -> None:
        self.cache, self.tokens, self.exact = cache, tokens, exact
        self._dense = RowAttention()
        self._table = cache.table_of_room(tokens)
        self._metadata = Metadata(cache, self._table)
        self._rooms: dict[torch.dtype, Tensor] = {}
        self._written = NOTHING
        self._parts: dict[Rows, tuple[Rows, Rows]] = {}

    def __call__(self, call: AttentionCall, fused: FusedKV, rows: Rows) -> Tensor:
        native, dense = self._split(rows)
        done = []
        if len(native):
            done.append(self._natively(call.part(0, len(native)), fused, native))
        if len(dense):
            done.append(self._dense(call.part(len(native), len(rows)), fused, dense))
            self._written = NOTHING  # what these rows have replaced
        return done[0] if len(done) == 1 else torch.cat(done, 1)

    def _split(self, rows: Rows) -> tuple[Rows, Rows]:
        """Return the rows that attend natively, and the others."""
        if rows not in self._parts:
            is_native = rows.is_run or self.cache.is_fast_for_scattered_rows
            count = len(rows) if is_native else int(np.searchsorted(rows.host, self.exact))
            self._parts[rows] = rows.part(0, count), rows.part(count, len(rows))
        return self._parts[rows]

    def _natively(self, call: AttentionCall, fused: FusedKV, rows: Rows) -> Tensor:
        layer, room = self.cache.attention[call.layer], self._filled(call.layer, fused, rows)
        query, key, value = (
            part[0].transpose(0, 1).contiguous() for part in (call.query, call.key, call.value)
        )
        output = torch.empty_like(query)
        if getattr(layer, "query_quant", None) is not None:  # such a kernel takes it quantized
            query = layer.query_quant(query.flatten(1), layer._q_scale)[0].view_as(query)
        for here, metadata in self._metadata.of(call.layer, rows):
            parts = (query[here], key[here], value[here])
            layer.impl.forward(layer, *parts, room, metadata, output=output[here])
        return output[None]

    def _filled(self, layer: int, fused: FusedKV, rows: Rows) -> Tensor:
        """Return the cache with a layer's KV, up to the last of these rows.

        Not further: KV of later rows may not have been computed, and kernels read a block of the
        cache to its end, where masked numbers must be finite.
        """
        dtype = self.cache.attention[layer].kv_cache.dtype
        if dtype not in self._rooms:
            self._rooms[dtype] = self.cache.room(layer, self.tokens)
        written, until = self._written
        start = until if written == layer and until <= rows.first else 0
        here = slice(start, rows.last + 1)
        self.cache.write(layer, fused, here, self._rooms[dtype], self._table.slots)
        self._written = layer, rows.last + 1
        return self._rooms[dtype]


class Metadata:
    """vLLM's metadata for rows of one sequence: to it, each run of them is a sequence of its own.

    table: where the sequence's tokens are.
    """

    def __init__(self, cache: PagedCache, table: BlockTable) -> None:
        self._cache, self._table = cache, table
        self._batches: dict[Rows, list[tuple[slice, CommonAttentionMetadata]]] = {}

    def of(self, layer: int, rows: Rows) -> Iterator[tuple[slice, Any]]:
        """Yield a layer's metadata for parts of rows; use each before the next is asked for."""
        for here, common in self.batches(rows):
            yield here, self._build(layer, common)

    def batches(self, rows: Rows) -> list[tuple[slice, CommonAttentionMetadata]]:
        """Return vLLM's common metadata for parts of rows, each a batch of sequences."""
        if rows not in self._batches:
            edges = _edges(rows.host)
            most = int(min(len(edges), self._cache.most_runs))
            starts = range(0, len(edges) - 1, most)
            parts = [edges[start : start + most + 1] for start in starts]
            self._batches[rows] = [
                (slice(int(part[0]), int(part[-1])), self._batch(rows, part)) for part in parts
            ]
        return self._batches[rows]

    def _batch(self, rows: Rows, edges: Positions) -> CommonAttentionMetadata:
        device = self._cache.device
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
            block_table_tensor=self._table.blocks[None].expand(len(ends), -1).contiguous(),
            slot_mapping=self._table.slots[here.device],
        )

    def _build(self, layer: int, common: CommonAttentionMetadata) -> Any:
        """Return the attention metadata that vLLM's builder makes for a layer.

        Only a builder's latest metadata are reused, whichever request they were built for: a
        builder may return views of one buffer, or keep a plan, and its next call overwrites both.
        """
        builder, latest = self._cache.builders[layer], self._cache.latest
        if id(builder) not in latest or latest[id(builder)][0] is not common:
            fast = self._cache.device.type != "cpu"
            latest[id(builder)] = (common, builder.build(0, common, fast_build=fast))
        return latest[id(builder)][1]


def _edges(positions: Positions) -> Positions:
    """Return the starts of runs of consecutive positions, and the end of the last run."""
    breaks = np.flatnonzero(np.diff(positions) != 1) + 1
    return np.concatenate(([0], breaks, [len(positions)]))
