"""Index time: chunks that need no document, computed in padded batches of like length."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from transformers.cache_utils import DynamicCache

from cacheblend_rag.engines.transformers.stack import TransformersStack
from cacheblend_rag.kv.chunk_kv import ChunkKV
from cacheblend_rag.prefill.lead_in import ChunkPlan

BATCH_TOKENS = 8192


def compute_batches(
    stack: TransformersStack, chunks: list[ChunkPlan]
) -> Iterator[tuple[ChunkPlan, ChunkKV]]:
    """Compute chunks behind their lead-in only, in batches of like length; without a prior.

    Padding stands on the right, where causal attention never looks, so it needs no mask.
    """
    for batch in _batches(sorted(chunks, key=lambda c: len(c.token_ids))):
        lead = len(batch[0].lead)
        width = lead + len(batch[-1].token_ids)
        rows = [[*c.lead, *c.token_ids] for c in batch]
        ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
        cache = DynamicCache()
        ids = ids.to(stack.geometry.device)
        stack.decoder(input_ids=ids, past_key_values=cache, use_cache=True)
        for index, chunk in enumerate(batch):
            part = (index, slice(None), slice(lead, lead + len(chunk.token_ids)))
            keys = torch.stack([layer.keys[part] for layer in cache.layers])
            values = torch.stack([layer.values[part] for layer in cache.layers])
            yield chunk, ChunkKV(keys, values, lead)


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
