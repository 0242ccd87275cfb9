"""Computes chunks that need no document in padded batches of similar length; stores any chunks."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence

import torch
from transformers.cache_utils import DynamicCache

from cacheblend_rag.engines.lifetime import working
from cacheblend_rag.engines.transformers.stack import TransformersStack
from cacheblend_rag.kv.chunk_kv import ChunkKV
from cacheblend_rag.kv.store import TieredKVStore
from cacheblend_rag.prefill.lead_in import ChunkPlan
from cacheblend_rag.prefill.precompute import Computed, NoRoom, or_no_room
from cacheblend_rag.reason import Miss, Reason, ReasonCode
from cacheblend_rag.report import PrecomputeReport

logger = logging.getLogger(__name__)

BATCH_TOKENS = 8192
MODEL_CHANGED = Reason(ReasonCode.MODEL_CHANGED, "the model has changed")
"""The reason for chunks of a model whose weights or adapters are not those it was opened with."""


def compute_batches(stack: TransformersStack, chunks: list[ChunkPlan]) -> Computed:
    """Compute chunks after their lead-in only, in batches of similar lengths; without a prior.

    A batch that exceeds memory is halved, down to single chunks.
    """
    waiting = deque(_batches(sorted(chunks, key=lambda c: len(c.token_ids))))
    while waiting:
        batch = waiting.popleft()
        for computed in or_no_room(batch, _compute_batch(stack, batch)):
            if isinstance(computed, NoRoom) and len(computed.chunks) > 1:
                middle = len(computed.chunks) // 2
                waiting.appendleft(list(computed.chunks[middle:]))
                waiting.appendleft(list(computed.chunks[:middle]))
            else:
                yield computed


def _compute_batch(stack: TransformersStack, batch: Sequence[ChunkPlan]) -> Computed:
    """Compute chunks at once.

    Padding is on the right, where causal attention never looks, so it needs no mask.
    """
    lead = len(batch[0].lead)
    width = lead + len(batch[-1].token_ids)
    rows = [[*c.lead, *c.token_ids] for c in batch]
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    cache = DynamicCache()
    ids = ids.to(stack.geometry.device)
    stack.decoder(input_ids=ids, past_key_values=cache, use_cache=True)
    for index, chunk in enumerate(batch):
        part = (index, slice(None), slice(lead, lead + len(chunk.token_ids)))
        layers = [torch.stack((layer.keys[part], layer.values[part])) for layer in cache.layers]
        yield chunk, ChunkKV(torch.stack(layers), lead)


def _batches(chunks: list[ChunkPlan]) -> Iterator[list[ChunkPlan]]:
    """Cut chunks, shortest first, into batches of at most BATCH_TOKENS padded tokens."""
    batch: list[ChunkPlan] = []
    for chunk in chunks:
        width = len(chunk.lead) + len(chunk.token_ids)
        if batch and width * (len(batch) + 1) > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(chunk)
    if batch:
        yield batch


def store_computed(
    store: TieredKVStore,
    plans: Sequence[ChunkPlan],
    steps: Computed,
    is_current: Callable[[], bool],
) -> Generator[PrecomputeReport]:
    """Run the steps that compute chunks, and store each chunk; yields after each step.

    is_current: returns whether the model is still as it was opened.
    """
    yield PrecomputeReport(skipped=sum(store.contains_many([plan.key for plan in plans])))
    for computed in steps:
        if computed is None:
            yield PrecomputeReport()
            continue
        if isinstance(computed, NoRoom):
            logger.warning("%d chunks not computed: %s", len(computed.chunks), computed.lack)
            failed = {Miss.NO_ROOM: len(computed.chunks)}
            yield PrecomputeReport(refused=failed, failed=failed)
            continue
        plan, kv = computed
        with working():
            put = store.put(plan.key, kv) if is_current() else None
        if put is None:
            yield PrecomputeReport(refused={MODEL_CHANGED: 1})
        elif put.refusal:
            refused = {put.refusal: 1}
            yield PrecomputeReport(refused=refused, failed=refused if put.failure else {})
        else:
            yield PrecomputeReport(computed=1, computed_tokens=kv.tokens)
