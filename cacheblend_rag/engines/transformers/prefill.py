"""Prefill: from a prompt's tokens to a filled cache and first logits, blended or ordinary."""

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
from cacheblend_rag.memory import NO_ROOM
from cacheblend_rag.prefill.chunk_loader import begin_reading
from cacheblend_rag.prefill.controller import Controller
from cacheblend_rag.prefill.lead_in import PlacedChunk
from cacheblend_rag.prefill.policy import UNREADABLE
from cacheblend_rag.prefill.prompt_pass import NotWorthLoading, PromptPass, absent
from cacheblend_rag.prefill.stopwatch import Stopwatch
from cacheblend_rag.report import ChunkReport, MissReason, PrefillReport
from cacheblend_rag.settings import BlendConfig


@dataclass
class Prefilled:
    """A prompt's KV and what is known about how it came to be.

    cache: None where the model keeps nothing. logits: (1, vocabulary) float32 of the first new
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
    """The model's own prefill; report: why it is asked, and what to say of chunks."""
    watch = Stopwatch(run_device(ordinary.model))
    cache, logits = ordinary.prefill(token_ids, reserve)
    watch.lap("recompute")
    yield
    report = replace(report, seconds=watch.seconds, starts=watch.starts)
    return Prefilled(cache, logits, report, watch.seconds, watch.starts)


class PromptChunks:
    """The chunks of one prompt and what the store holds of them."""

    def __init__(self, prompt: PreparedPrompt, store: TieredKVStore) -> None:
        self.token_ids, self.placed, self.store = prompt.token_ids, prompt.placed, store

    def held(self) -> list[tuple[PlacedChunk, bool]]:
        """The chunks, each with whether the store says that it holds its KV."""
        held = self.store.contains_many([chunk.key for chunk in self.placed])
        return list(zip(self.placed, held, strict=True))

    def stored_tokens(self) -> int:
        """Tokens of chunks whose KV the store says it holds."""
        return sum(chunk.end - chunk.start for chunk, there in self.held() if there)

    def source(self, stack: DecoderStack) -> LayerSource:
        """Begin to read them, for a pass over a model."""
        return begin_reading(self.store, (chunk.key for chunk in self.placed), stack)

    def missed(self, reason: MissReason | None = None) -> list[ChunkReport]:
        """Report every chunk as a miss, for ``reason`` or else as not stored.

        Of a prompt of which too little is stored, or which found no memory, the rest is not stored
        all the same.
        """
        if reason not in {"too short", NO_ROOM}:
            return [c.report(reason) if reason else absent(self.store, c) for c in self.placed]
        return [
            chunk.report(reason) if there else absent(self.store, chunk)
            for chunk, there in self.held()
        ]


def blended_prefill(
    stack: TransformersStack,
    chunks: PromptChunks,
    source: LayerSource,
    config: BlendConfig,
    reserve: int,
    *,
    controller: Controller | None = None,
) -> Steps[Prefilled | NotWorthLoading]:
    """Load, select, recompute: one chunk, then one block of rows in one layer, at a time."""
    ids = torch.tensor(chunks.token_ids, device=stack.geometry.device)
    work = PromptPass(stack, ids, chunks.placed, source, config, reserve, controller=controller)
    done = yield from work.steps()
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
