"""Tests whether a worker's layers, run alone, match the model, and warms up."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cacheblend_rag.blend import FusedKV
from cacheblend_rag.blend.rounding import cache_step
from cacheblend_rag.blend.row_attention import RowAttention
from cacheblend_rag.blend.rows import Rows
from cacheblend_rag.blend.trial import (
    Reference,
    check_embedding,
    check_layers,
    find_layouts,
    key_traits,
    made_up,
    tokens_behind,
    trial_tokens,
)
from cacheblend_rag.engines.catalog import Name
from cacheblend_rag.engines.found_chunk import FoundChunk
from cacheblend_rag.engines.vllm.connector.job_runner import JobRunner
from cacheblend_rag.engines.vllm.connector.metadata import Allotted
from cacheblend_rag.engines.vllm.connector.paged import PagedAttention, PagedKV
from cacheblend_rag.engines.vllm.connector.paged_cache import PagedCache
from cacheblend_rag.engines.vllm.connector.stack import VLLMStack
from cacheblend_rag.engines.vllm.protocol.job import Precompute, Span
from cacheblend_rag.kv.chunk_kv import chunk_id
from cacheblend_rag.kv.store import TieredKVStore
from cacheblend_rag.prefill.lead_in import LeadInId
from cacheblend_rag.settings import BlendConfig


@dataclass(frozen=True)
class Trial:
    """The test of a worker's model.

    blocks: of the paged cache. window: the model's context window.
    """

    stack: VLLMStack
    cache: PagedCache
    blocks: int
    window: int
    vocabulary: int

    @torch.inference_mode()
    def run(self) -> list[int]:
        """Test the model, which also runs lazy initialization; returns its ``key_traits``.

        Call it while no request holds blocks: it writes into some. Raises
        UnsupportedModelError when its layers, run alone, do not match the model.
        """
        ids = trial_tokens(self.vocabulary, self.stack.geometry.device)
        fused = self._made_up(ids)
        reference = self._reference(ids, fused)
        check_embedding(self.stack, reference)
        dtypes = (layer.kv_cache.dtype for layer in self.cache.attention)
        step = cache_step(min(dtypes, key=lambda one: one.itemsize), self.stack.geometry.dtype)
        self.stack.layouts = find_layouts(self.stack, ids, self.window, cache_step=step)
        native = PagedAttention(self.cache, fused.tokens, exact=fused.tokens)
        for attention in (native, RowAttention(kernels=False)):
            check_layers(
                self.stack,
                reference,
                fused,
                attention,
                cache_step=step,
                quantized=self.stack.is_quantized,
            )
        return key_traits(self.stack, ids)

    def _reference(self, ids: Tensor, fused: FusedKV) -> Reference:
        """Run the model itself on the tokens, after synthetic KV in its own cache."""
        start = fused.tokens - ids.numel()
        paged = PagedKV(self.cache, self.cache.first_blocks(fused.tokens), 0, fused.tokens)
        for layer in range(self.stack.geometry.layers):
            paged.finish_layer(layer, fused)
        rows = Rows.at(np.arange(start, fused.tokens), self.stack.geometry.device)
        with self.stack.recorded() as (inputs, outputs):
            self.stack.run_model(ids, rows.device, paged.metadata(rows))
        return Reference(ids, start, inputs, outputs)

    def _made_up(self, ids: Tensor) -> FusedKV:
        """Return synthetic KV, as much as fits into the cache besides the test's tokens."""
        each = (self.blocks - 1) // self.cache.group_count
        room = min(self.window, each * self.cache.block_size)
        behind = tokens_behind(self.stack.windows, room)
        return made_up(self.stack, ids, behind)


CHUNK_TOKENS = (32, 37)
"""Of the chunks of a made-up prompt. Triton compiles multiples of 16 by themselves."""
TEXT_TOKENS = 5
"""Before, between and after them."""
LEAD_IN = LeadInId("none", "", 0)
CONFIG = BlendConfig(min_tokens=0, recompute_ratio=0.3, cost_model=False)


@torch.inference_mode()
def warm_up(jobs: JobRunner) -> None:
    """Store and blend made-up chunks, so that no request waits for kernels to be compiled.

    Call it while no request holds blocks: it writes into some.
    """
    with TieredKVStore.open(precision=jobs.store.precision) as store:
        own = JobRunner(jobs.stack, jobs.cache, store, namespace="")
        prompt, found = [1] * TEXT_TOKENS, list[FoundChunk]()
        for tokens in CHUNK_TOKENS:
            chunk = tuple(token % 2 for token in range(tokens))
            job = Precompute(lead_in=LEAD_IN, tokens=chunk, chunks=(Span(0, tokens),))
            _run(own, job, chunk, 1)
            name = Name("", chunk_id(chunk), "", LEAD_IN)
            found.append(FoundChunk(name, len(prompt), len(prompt) + tokens))
            prompt += [*chunk, *[1] * TEXT_TOKENS]
            _run(own, CONFIG, tuple(prompt), found[-1].end, tuple(found))


def _run(
    jobs: JobRunner,
    work: Precompute | BlendConfig,
    tokens: tuple[int, ...],
    until: int,
    chunks: tuple[FoundChunk, ...] = (),
) -> None:
    blocks = tuple(map(tuple, jobs.cache.first_blocks(len(tokens))))
    allotted = Allotted("warm-up", work, chunks, tokens, 0, until, blocks)
    source = jobs.source(allotted)
    try:
        for _ in jobs.work(allotted, source):
            pass
    finally:
        source.close()
