"""Prefills a prompt, blended or ordinary, and scores given answers behind it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar, cast

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from cacheblend_rag.blend.rows import token_tensor
from cacheblend_rag.blend.stack import DecoderStack
from cacheblend_rag.blend.steps import Steps
from cacheblend_rag.engines.prepare import PreparedPrompt
from cacheblend_rag.engines.stream import Cancellation
from cacheblend_rag.engines.transformers.cache import FusedCache
from cacheblend_rag.engines.transformers.loop import NOTHING, Work
from cacheblend_rag.engines.transformers.ordinary_prefill import OrdinaryPrefill
from cacheblend_rag.engines.transformers.stack import TransformersStack
from cacheblend_rag.errors import ConfigError, PromptTooLongError
from cacheblend_rag.kv.fetch import LayerSource, Threshold
from cacheblend_rag.kv.store import TieredKVStore
from cacheblend_rag.prefill.chunk_loader import begin_reading
from cacheblend_rag.prefill.controller import Controller
from cacheblend_rag.prefill.lead_in import PlacedChunk
from cacheblend_rag.prefill.policy import missed, threshold
from cacheblend_rag.prefill.prefix import StoredPrefix
from cacheblend_rag.prefill.prompt_pass import FusedPrompt, PromptPass
from cacheblend_rag.prefill.stopwatch import Stopwatch
from cacheblend_rag.report import BlendReport, ChunkReport, MissReason, PrefillReport
from cacheblend_rag.settings import BlendConfig

T = TypeVar("T")

NOT_ASKED = PrefillReport()
"""Of a prompt for which the store was not asked yet."""


@dataclass
class Prefilled:
    """A prompt's KV, and the report of its prefill.

    cache: None if the model has none. logits: (1, vocabulary) float32 of the first new
    token. report: decoding adds its seconds to it. answer: the tokens decoded so far.
    """

    cache: Cache | None
    logits: Tensor
    report: PrefillReport
    answer: list[int] = field(default_factory=list)


def while_wanted(
    steps: Steps[T], cancel: Cancellation, source: LayerSource | None = None
) -> Work[T | None]:
    """Run steps, each once what it takes from ``source`` has been read; None if cancelled."""
    while not cancel.is_set():
        try:
            next(steps)
        except StopIteration as done:
            return cast(T, done.value)
        yield NOTHING if source is None else source.awaited()
    return None


def ordinary_prefill(
    ordinary: OrdinaryPrefill, token_ids: Sequence[int], reserve: int, report: PrefillReport
) -> Steps[Prefilled]:
    """Run the model's own prefill.

    report: the reason, the reports of chunks, and what asking the store has taken.
    """
    watch = Stopwatch(ordinary.model.device, dict(report.seconds), dict(report.starts))
    cache, logits = ordinary.prefill(token_ids, reserve)
    watch.lap("recompute")
    yield
    report = replace(report, seconds=watch.seconds, starts=watch.starts)
    return Prefilled(cache, logits, report)


class PromptChunks:
    """The stored parts of one prompt: blocks of its prefix, and its chunks.

    placed: its chunks, and the parts of its conversation's earlier turns, in order. prefix: its
    first blocks, None if none are looked up. asked: what the store was asked before has taken.
    request_id: names it in logs. found: the chunks' reports, once the store was asked for them.
    """

    def __init__(
        self,
        prompt: PreparedPrompt,
        store: TieredKVStore,
        placed: Sequence[PlacedChunk],
        prefix: StoredPrefix | None = None,
        *,
        asked: PrefillReport = NOT_ASKED,
        request_id: str = "",
    ) -> None:
        self.token_ids, self.store = prompt.token_ids, store
        self.prefix, self.blocks = prefix, () if prefix is None else prefix.keys
        self.placed, self.asked, self.request_id = placed, asked, request_id
        self.found: list[ChunkReport] = []

    def source(self, stack: DecoderStack, config: BlendConfig) -> LayerSource:
        """Begin to read them, for a pass over a model."""
        keys = (*self.blocks, *(chunk.key for chunk in self.placed))
        worth = threshold(self.placed, config.min_tokens if self.placed else 0)
        worth = Threshold([*(0 for _ in self.blocks), *worth.tokens], worth.least)
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
) -> Steps[Prefilled | PrefillReport]:
    """Load, select and recompute: one chunk, then one block of rows in one layer, at a time."""
    ids = token_tensor(chunks.token_ids, stack.geometry.device)
    work = PromptPass(
        stack,
        ids,
        chunks.placed,
        source,
        config,
        reserve,
        graphed=stack.graphed,
        controller=controller,
        prefix_blocks=len(chunks.blocks),
        request_id=chunks.request_id,
    )
    work.watch.seconds.update(chunks.asked.seconds)
    work.watch.starts.update(chunks.asked.starts)
    try:
        done = yield from work.steps()
    finally:
        chunks.found = work.found  # also of an abandoned pass, so that nothing holds it
    if not isinstance(done, FusedPrompt):
        return done
    logits = stack.logits(cast(Tensor, done.hidden))
    work.watch.lap("first_token")
    return Prefilled(FusedCache(done.fused, ids.numel(), stack.windows), logits, done)


@dataclass(frozen=True)
class ContinuationScore:
    """The model's predictions at each step of a given answer.

    Args:
        log_probs: (tokens, vocabulary) float32, natural logarithms, on the host; row i predicts the
            answer's token i after the prompt and its first i tokens.
        report: how the prompt was prefilled.
    """

    log_probs: Tensor
    report: BlendReport


def check_scored(
    prompt_tokens: int, continuations: Sequence[Sequence[int]], context_window: int
) -> None:
    """Check continuations before they are scored.

    Raises ConfigError for one without tokens, and PromptTooLongError if the longest does not fit
    behind the prompt.
    """
    if not all(continuations):
        raise ConfigError("continuation is empty: give at least one token to score")
    tokens = prompt_tokens + max(map(len, continuations), default=0)
    if tokens > context_window:
        raise PromptTooLongError(tokens, context_window)


def forced_log_probs(
    ordinary: OrdinaryPrefill,
    prefilled: Prefilled,
    token_ids: Sequence[int],
    answer: Sequence[int],
) -> Tensor:
    """Return the log-probabilities at each step of an answer, (tokens, vocabulary) float32.

    token_ids: the prompt's; whatever was decoded behind it before is forgotten. The prompt's KV is
    as before afterwards.
    """
    logits, more = prefilled.logits, len(answer) - 1
    if more:
        cache = _reusable(prefilled.cache)
        if isinstance(cache, FusedCache):
            cache.crop(len(token_ids))
        later = ordinary.continued(cache, (*token_ids, *answer[:-1]), more)
        logits = torch.cat([logits, later])
    return logits.log_softmax(-1).cpu()


def decodable(prefilled: Prefilled) -> Prefilled:
    """Return a prefilled prompt whose KV cache decoding may extend, so that the original can still
    be used to score answers.
    """
    return replace(prefilled, cache=_reusable(prefilled.cache), answer=[])


def _reusable(cache: Cache | None) -> Cache | None:
    """Return a cache that may be written to; only ours can be cut back, whatever the layers."""
    return cache if isinstance(cache, FusedCache) else copy.deepcopy(cache)
