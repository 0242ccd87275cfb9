"""Index time: computing chunk KV behind its lead-in, and each chunk's prior.

Chunks that need no document are computed in padded batches. A document is computed in one pass and
sliced into its chunks; chunks of it that are stored already are laid into the pass as cached KV, so
editing a document recomputes only what follows the edit.

The prior of a token is the squared deviation of its key in the first layer that depends on other
tokens, between the chunk behind its lead-in alone and the chunk in its document. Whichever of the
two is not computed anyway is run through that one layer only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from cacheblend_rag.blend import AttentionCall, BlendPass, FusedKV
from cacheblend_rag.blend.attention import attend_rows
from cacheblend_rag.blend.passes import Candidates
from cacheblend_rag.blend.probe import REUSE_ONLY
from cacheblend_rag.blend.rotary import rotated
from cacheblend_rag.blend.stack import DecoderStack
from cacheblend_rag.fusion.lead_in import LedChunk
from cacheblend_rag.kv.chunk_kv import ChunkKV
from cacheblend_rag.kv.store import TieredKVStore

Computed = Iterator[tuple[LedChunk, ChunkKV] | None]
"""Chunks as they are computed; None where a layer was run and others may have their turn."""

ComputeAlone = Callable[[list[LedChunk]], Computed]
"""Computes chunks behind their lead-in only, without a prior."""

PRIOR_LAYER = 1
"""The first layer whose keys depend on other tokens: comparing there costs about one layer."""


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
    stack: DecoderStack,
    chunks: Iterable[LedChunk],
    store: TieredKVStore,
    *,
    alone: ComputeAlone,
    in_document: bool,
) -> Computed:
    """Yield the KV and prior of every chunk not in ``store``.

    in_document: chunks are computed behind their document (lead-in ``document``); otherwise behind
    the lead-in alone, and the document only serves the prior.
    """
    unrelated: list[LedChunk] = []
    for work in document_passes(chunks):
        missing = [chunk for chunk, _ in work.members if not store.contains(chunk.key)]
        if not any(chunk.context for chunk, _ in work.members):
            unrelated += missing
        elif in_document:
            yield from compute_document(stack, work, store)
        elif missing:
            starts = {chunk.key: start for chunk, start in work.members}
            contextual = keys_of_prior_layer(stack, work.tokens)
            for computed in alone(missing):
                if computed is None:
                    yield None
                    continue
                chunk, kv = computed
                start = starts[chunk.key]
                there = contextual[:, start : start + kv.tokens]
                here = kv.keys[prior_layer(stack)]
                prior = context_deviation(stack, here, there, start - kv.position)
                yield chunk, replace(kv, prior=prior)
    yield from alone(unrelated)


def compute_document(stack: DecoderStack, work: DocumentPass, store: TieredKVStore) -> Computed:
    """Run one document pass; yield the KV and prior of every member not in ``store``."""
    missing = [(c, at) for c, at in work.members if not store.contains(c.key)]
    if not missing:
        return
    end = missing[-1][1] + len(missing[-1][0].token_ids)
    device = stack.geometry.device
    ids = torch.tensor(work.tokens[:end], device=device)
    fused = FusedKV(stack.geometry, end)
    cached = torch.zeros(end, dtype=torch.bool, device=device)
    for chunk, start in work.members:
        if (chunk, start) in missing or start >= end:
            continue
        found = store.get(chunk.key, promote=False).kv
        if found is None or not fused.fits(found, len(chunk.token_ids)):
            missing.append((chunk, start))
        else:
            fused.place(stack, found, start)
            cached[start : start + found.tokens] = True
    yield from _run(stack, ids, fused, cached)
    for chunk, start in missing:
        kv = fused.slice(start, start + len(chunk.token_ids))
        prior = torch.zeros(kv.tokens, device=device)
        if chunk.context:
            lead = len(chunk.lead)
            alone = keys_of_prior_layer(stack, [*chunk.lead, *chunk.token_ids])[:, lead:]
            there = kv.keys[prior_layer(stack)]
            prior = context_deviation(stack, alone, there, start - lead)
        yield chunk, replace(kv, prior=prior)


def compute_one_by_one(stack: DecoderStack, chunks: Iterable[LedChunk]) -> Computed:
    """Compute chunks behind their lead-in only, each in a pass of its own; without a prior."""
    device = stack.geometry.device
    for chunk in chunks:
        ids = torch.tensor([*chunk.lead, *chunk.token_ids], device=device)
        fused = FusedKV(stack.geometry, ids.numel())
        yield from _run(stack, ids, fused, torch.zeros_like(ids, dtype=torch.bool))
        yield chunk, fused.slice(len(chunk.lead), ids.numel())


def _run(stack: DecoderStack, ids: Tensor, fused: FusedKV, cached: Tensor) -> Iterator[None]:
    """Compute all tokens that are not cached."""
    candidates = Candidates(cached, cached, torch.zeros_like(ids))
    run = BlendPass(stack, ids, fused, candidates, REUSE_ONLY, needs_hidden=False)
    for _ in run.steps():
        yield None


def prior_layer(stack: DecoderStack) -> int:
    """Return PRIOR_LAYER, or the only layer of a model that has no more."""
    return min(PRIOR_LAYER, stack.geometry.layers - 1)


def keys_of_prior_layer(stack: DecoderStack, tokens: Sequence[int]) -> Tensor:
    """Return the keys (kv_heads, tokens, head_dim) of PRIOR_LAYER, running only what is before it.

    tokens: the whole sequence from position 0.
    """
    ids = torch.tensor([tokens], device=stack.geometry.device)
    rows = torch.arange(ids.shape[1], device=ids.device)
    place, hidden = stack.at(rows[None]), stack.embed(ids)
    last = prior_layer(stack)

    def attend(call: AttentionCall) -> Tensor:
        return attend_rows(
            call.query, call.key, call.value, rows,
            scaling=call.scaling, window=call.window, softcap=call.softcap,
        )  # fmt: skip

    for layer in range(last):
        hidden = stack.run_layer(layer, hidden, place, attend)
    return stack.probe_layer(last, hidden, place).key[0]


def context_deviation(stack: DecoderStack, alone: Tensor, contextual: Tensor, by: int) -> Tensor:
    """Return the prior, (tokens,) float32: how far a chunk's document moves its keys.

    alone, contextual: keys (kv_heads, tokens, head_dim) of PRIOR_LAYER, computed behind the lead-in
    only and in the document. by: positions the chunk stands further on in the document.
    """
    layer = prior_layer(stack)
    cos, sin = stack.rotation(by)
    moved = rotated(alone[None], cos[layer, None], sin[layer, None])[0]
    return (moved.float() - contextual.float()).square().sum((0, 2))
