"""Index time: computing chunk KV behind its lead-in, and each chunk's prior.

Chunks that need no document are computed in padded batches. A document is computed in one pass and
sliced into its chunks; chunks of it that are stored already are laid into the pass as cached KV, so
editing a document recomputes only what follows the edit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from cacheblend_rag.blend import AttentionCall, BlendPass, FusedKV
from cacheblend_rag.blend.attention import BLOCK_ROWS, attention_mass
from cacheblend_rag.blend.passes import Candidates
from cacheblend_rag.blend.probe import REUSE_ONLY
from cacheblend_rag.engines.transformers.leadin import LedChunk
from cacheblend_rag.engines.transformers.stack import TransformersStack
from cacheblend_rag.kv.chunk_kv import ChunkKV
from cacheblend_rag.kv.store import TieredKVStore

BATCH_TOKENS = 8192


@dataclass
class DocumentPass:
    """One run over lead-in and document tokens, and the chunks sliced from it."""

    tokens: list[int]
    members: list[tuple[LedChunk, int]] = field(default_factory=list)

    def takes(self, chunk: LedChunk) -> bool:
        """Add the chunk when its lead-in continues this pass; returns whether it did."""
        before = [*chunk.lead, *chunk.context]
        if before[: len(self.tokens)] != self.tokens:
            return False
        self.tokens = [*before, *chunk.token_ids]
        self.members.append((chunk, len(before)))
        return True


def document_passes(chunks: Iterable[LedChunk]) -> list[DocumentPass]:
    """Group chunks, each document's in order, into as few passes as their contexts allow."""
    passes: list[DocumentPass] = []
    for chunk in chunks:
        if not passes or not passes[-1].takes(chunk):
            passes.append(DocumentPass([]))
            passes[-1].takes(chunk)
    return passes


def compute_chunks(
    stack: TransformersStack,
    model: PreTrainedModel,
    chunks: Iterable[LedChunk],
    store: TieredKVStore,
    *,
    contextual: bool,
) -> Iterator[tuple[LedChunk, ChunkKV]]:
    """Yield the KV and prior of every chunk not in ``store``.

    contextual: chunks are computed behind their document (lead-in ``document``); otherwise behind
    the lead-in alone, and the document pass only serves the prior.
    """
    alone: list[LedChunk] = []
    for work in document_passes(chunks):
        missing = [chunk for chunk, _ in work.members if not store.contains(chunk.key)]
        if not any(chunk.context for chunk, _ in work.members):
            alone += missing
        elif contextual:
            yield from compute_document(stack, work, store)
        elif missing:
            priors = {chunk.key: kv.prior for chunk, kv in compute_document(stack, work, None)}
            for chunk, kv in compute_alone(stack, model, missing):
                yield chunk, replace(kv, prior=priors[chunk.key])
    yield from compute_alone(stack, model, alone)


def compute_document(
    stack: TransformersStack, work: DocumentPass, store: TieredKVStore | None
) -> Iterator[tuple[LedChunk, ChunkKV]]:
    """Run one document pass; yield chunk KV, prior included, of every member not in ``store``.

    The prior is attention mass: how much of a token's attention leaves the chunk for its document,
    at most, over all heads and layers. It comes from this very pass.
    """
    missing = [(c, at) for c, at in work.members if store is None or not store.contains(c.key)]
    if not missing:
        return
    end = missing[-1][1] + len(missing[-1][0].token_ids)
    device = stack.geometry.device
    ids = torch.tensor(work.tokens[:end], device=device)
    fused = FusedKV(stack.geometry, end)
    cached = torch.zeros(end, dtype=torch.bool, device=device)
    for chunk, start in work.members:
        if store is None or (chunk, start) in missing or start >= end:
            continue
        found = store.get(chunk.key, promote=False).kv
        if found is None:
            missing.append((chunk, start))
        else:
            fused.place(stack, found, start)
            cached[start : start + found.tokens] = True
    mass = _ContextMass(end, len(work.members[0][0].lead), missing, device)
    BlendPass(
        stack, ids, fused, Candidates(cached, cached, torch.zeros_like(ids)), REUSE_ONLY,
        observer=mass.observe,
    ).run()  # fmt: skip
    for chunk, start in missing:
        stop = start + len(chunk.token_ids)
        kv = fused.slice(start, stop)
        yield chunk, ChunkKV(kv.keys, kv.values, start, mass.prior[start:stop].clone())


def compute_alone(
    stack: TransformersStack, model: PreTrainedModel, chunks: list[LedChunk]
) -> Iterator[tuple[LedChunk, ChunkKV]]:
    """Compute chunks behind their lead-in only, in batches of like length; without a prior.

    Padding stands on the right, where causal attention never looks, so it needs no mask.
    """
    for batch in _batches(sorted(chunks, key=lambda c: len(c.token_ids))):
        lead = len(batch[0].lead)
        width = lead + len(batch[-1].token_ids)
        rows = [[*c.lead, *c.token_ids] for c in batch]
        ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
        cache = DynamicCache()
        model.get_decoder()(
            input_ids=ids.to(stack.geometry.device), past_key_values=cache, use_cache=True
        )
        for index, chunk in enumerate(batch):
            part = (index, slice(None), slice(lead, lead + len(chunk.token_ids)))
            keys = torch.stack([layer.keys[part] for layer in cache.layers])
            values = torch.stack([layer.values[part] for layer in cache.layers])
            yield chunk, ChunkKV(keys, values, lead)


class _ContextMass:
    """Watches a document pass and keeps, for each token, the attention that leaves its chunk."""

    def __init__(
        self, tokens: int, lead: int, chunks: list[tuple[LedChunk, int]], device: torch.device
    ) -> None:
        self.prior = torch.zeros(tokens, device=device)
        self.lead = lead
        self.chunk_start = torch.zeros(tokens, dtype=torch.long, device=device)
        for chunk, start in chunks:
            self.chunk_start[start : start + len(chunk.token_ids)] = start

    def observe(self, call: AttentionCall, rows: Tensor, keys: Tensor) -> None:
        watched = (self.chunk_start[rows] > self.lead).nonzero()[:, 0]
        for start in range(0, watched.numel(), BLOCK_ROWS):
            part = watched[start : start + BLOCK_ROWS]
            here = rows[part]
            shares = attention_mass(
                call.query[:, :, part], keys[:, :, : int(here[-1]) + 1], here,
                scaling=call.scaling, window=call.window, softcap=call.softcap,
            )  # fmt: skip
            index = torch.arange(shares.shape[2], device=shares.device)[None]
            context = (index >= self.lead) & (index < self.chunk_start[here][:, None])
            left = (shares * context).sum(2).amax(0)
            self.prior[here] = torch.maximum(self.prior[here], left)


def _batches(chunks: list[LedChunk]) -> Iterator[list[LedChunk]]:
    """Cut chunks, shortest first, into batches of at most BATCH_TOKENS padded tokens."""
    batch: list[LedChunk] = []
    for chunk in chunks:
        width = len(chunk.lead) + len(chunk.token_ids)
        if batch and width * (len(batch) + 1) > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(chunk)
    if batch:
        yield batch
