"""Tests whether a worker's layers, run alone, match the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cacheblend_rag.blend import FusedKV
from cacheblend_rag.blend.rounding import cache_step
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
from cacheblend_rag.engines.vllm.connector.paged import PagedKV
from cacheblend_rag.engines.vllm.connector.paged_cache import PagedCache
from cacheblend_rag.engines.vllm.connector.settings import AttentionMode
from cacheblend_rag.engines.vllm.connector.stack import VLLMStack

MODES: tuple[AttentionMode, ...] = ("native", "sdpa")


@dataclass(frozen=True)
class Trial:
    """The test of a worker's model.

    blocks: of the paged cache. window: the model's context window. mode: how rows
    attend; ``auto`` tests each way that it may choose.
    """

    stack: VLLMStack
    cache: PagedCache
    blocks: int
    window: int
    vocabulary: int
    mode: AttentionMode

    @property
    def tokens(self) -> Tensor:
        """The tokens that the model is run on, (rows,)."""
        return trial_tokens(self.vocabulary, self.stack.geometry.device)

    @torch.inference_mode()
    def run(self) -> list[int]:
        """Test the model, which also runs lazy initialization; returns its ``key_traits``.

        Call it while no request holds blocks: it writes into some. Raises
        UnsupportedModelError when its layers, run alone, do not match the model.
        """
        ids = self.tokens
        fused = self._made_up(ids)
        blocks = self.cache.first_blocks(fused.tokens)
        reference = self._reference(ids, fused, blocks)
        check_embedding(self.stack, reference)
        dtypes = (layer.kv_cache.dtype for layer in self.cache.attention)
        step = cache_step(min(dtypes, key=lambda one: one.itemsize), self.stack.geometry.dtype)
        self.stack.layouts = find_layouts(self.stack, ids, self.window, cache_step=step)
        for mode in MODES if self.mode == "auto" else (self.mode,):
            paged = PagedKV(self.cache, blocks, 0, fused.tokens, mode)
            check_layers(
                self.stack,
                reference,
                fused,
                paged.attend,
                cache_step=step,
                quantized=self.stack.is_quantized,
            )
        return key_traits(self.stack, ids)

    def _reference(self, ids: Tensor, fused: FusedKV, blocks: Sequence[range]) -> Reference:
        """Run the model itself on the tokens, after synthetic KV in its own cache."""
        start = fused.tokens - ids.numel()
        own = PagedKV(self.cache, blocks, 0, fused.tokens, "native")
        for layer in range(self.stack.geometry.layers):
            own.finish_layer(layer, fused)
        rows = Rows.at(np.arange(start, fused.tokens), self.stack.geometry.device)
        with self.stack.recorded() as (inputs, outputs):
            self.stack.run_model(ids, rows.device, own.run(rows))
        return Reference(ids, start, inputs, outputs)

    def _made_up(self, ids: Tensor) -> FusedKV:
        """Return synthetic KV, as much as fits into the cache besides the test's tokens."""
        each = (self.blocks - 1) // self.cache.group_count
        room = min(self.window, each * self.cache.block_size)
        behind = tokens_behind(self.stack.windows, room)
        return made_up(self.stack, ids, behind)
