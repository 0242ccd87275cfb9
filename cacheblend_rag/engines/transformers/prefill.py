"""Prefills a prompt, blended or ordinary: fills a cache and returns the first logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from cacheblend_rag.blend.stack import DecoderStack
from cacheblend_rag.blend.steps import Steps
from cacheblend_rag.engines.prepare import PreparedPrompt
from cacheblend_rag.engines.transformers.cache import FusedCache
from cacheblend_rag.engines.transformers.offloading import run_device
from cacheblend_rag.engines.transformers.ordinary_prefill import OrdinaryPrefill
from cacheblend_rag.engines.transformers.stack import TransformersStack
from cacheblend_rag.kv.fetch import LayerSource
from cacheblend_rag.kv.store import TieredKVStore
from cacheblend_rag.prefill.chunk_loader import begin_reading
from cacheblend_rag.prefill.controller import Controller
from cacheblend_rag.prefill.policy import UNREADABLE, missed, threshold
from cacheblend_rag.prefill.prompt_pass import NotWorthLoading, PromptPass
from cacheblend_rag.prefill.stopwatch import Stopwatch
from cacheblend_rag.report import ChunkReport, MissReason, PrefillReport
from cacheblend_rag.settings import BlendConfig


@dataclass
class Prefilled:
    """A prompt's KV, and the report of its prefill.

    cache: None if the model has none. logits: (1, vocabulary) float32 of the first new
    token. seconds, starts: by phase, those of ``report``, to which decoding adds its own.
    """

    cache: Cache | None
    logits: Tensor
    report: PrefillReport
    seconds: dict[str, float]
    starts: dict[str, float]


def ordinary_prefill(
    ordinary: OrdinaryPrefill, token_ids: Sequence[int], reserve: int, report: PrefillReport
) -> Steps[Prefilled]:
    """Run the model's own prefill; report: the reason, and the reports of chunks."""
    watch = Stopwatch(run_device(ordinary.model))
    cache, logits = ordinary.prefill(token_ids, reserve)
    watch.lap("recompute")
    yield
    report = replace(report, seconds=watch.seconds, starts=watch.starts)
    return Prefilled(cache, logits, report, watch.seconds, watch.starts)


class PromptChunks:
    """The chunks of one prompt. found: their reports, once the store was asked."""

    def __init__(self, prompt: PreparedPrompt, store: TieredKVStore) -> None:
        self.token_ids, self.placed, self.store = prompt.token_ids, prompt.placed, store
        self.found: list[ChunkReport] = []

    def source(self, stack: DecoderStack, config: BlendConfig) -> LayerSource:
        """Begin to read them, for a pass over a model."""
        keys = (chunk.key for chunk in self.placed)
        worth = threshold(self.placed, config.min_tokens)
        return begin_reading(self.store, keys, stack, threshold=worth)

    def missed(self, reason: MissReason) -> list[ChunkReport]:
        """Report every chunk as a miss; chunks that are not stored keep that reason."""
        return missed(self.found, reason) or [chunk.report(reason) for chunk in self.placed]


def blended_prefill(
    stack: TransformersStack,
    chunks: PromptChunks,
    source: LayerSource,
    config: BlendConfig,
    reserve: int,
    *,
    controller: Controller | None = None,
) -> Steps[Prefilled | NotWorthLoading]:
    """Load, select and recompute: one chunk, then one block of rows in one layer, at a time."""
    ids = torch.tensor(chunks.token_ids, device=stack.geometry.device)
    work = PromptPass(stack, ids, chunks.placed, source, config, reserve, controller=controller)
    try:
        done = yield from work.steps()
    finally:
        chunks.found = work.found  # also of an abandoned pass, so that nothing holds it
    if isinstance(done, NotWorthLoading):
        return done
    logits = stack.logits(cast(Tensor, done.hidden))
    work.watch.lap("first_token")
    report = PrefillReport(
        reason=None if done.blended else UNREADABLE,
        selector=done.selector,
        selector_reason=done.selector_reason,
        ratio_reason=done.ratio_reason,
        ratio=done.ratio,
        compute_share=done.compute_share,
        chunks=done.chunks,
        seconds=done.seconds,
        starts=work.watch.starts,
        trace=done.trace,
    )
    cache = FusedCache(done.fused, ids.numel(), stack.windows)
    return Prefilled(cache, logits, report, done.seconds, work.watch.starts)
