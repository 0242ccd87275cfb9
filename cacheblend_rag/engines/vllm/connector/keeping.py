"""Stores segments of a conversation's turn, whose KV is computed again by a blend pass."""

from __future__ import annotations

from collections.abc import Sequence

from cacheblend_rag.blend import BlendPass, FusedKV
from cacheblend_rag.blend.passes import Candidates
from cacheblend_rag.blend.question_probe import REUSE_ONLY
from cacheblend_rag.blend.stack import DecoderStack, on_all_ranks
from cacheblend_rag.blend.steps import Steps
from cacheblend_rag.engines.vllm.connector.chunk_writer import ChunkWriter
from cacheblend_rag.engines.vllm.protocol import KeepResult
from cacheblend_rag.kv.store import TieredKVStore
from cacheblend_rag.prefill.prefix import KVPart
from cacheblend_rag.prefill.prompt_pass import FusedPrompt, PromptPass


def keep(
    stack: DecoderStack, store: TieredKVStore, blended: PromptPass, parts: Sequence[KVPart]
) -> Steps[KeepResult]:
    """Compute the KV of a prompt and its answer, and store those parts that the store lacks.

    Args:
        stack: of the model.
        store: where they are kept.
        blended: the pass over all tokens, in a buffer that keeps all layers.
        parts: of these tokens.
    """
    yield
    held = on_all_ranks(stack, store.contains_many(part.key for part in parts))
    missing = [part for part, is_held in zip(parts, held, strict=True) if not is_held]
    if not missing:
        return KeepResult(tuple(part.start for part in parts))
    fused, share = yield from _computed(stack, blended)
    writer = ChunkWriter(stack, store)
    try:
        for part in missing:
            yield from writer.put(part.key, part.copy(fused))
            yield
        yield from writer.finish()
    finally:
        # Who gives up waiting may evict the segments at once: none may be stored after that.
        writer.close(drop=True)
    pairs = zip(missing, writer.results, strict=True)
    refused = {part.start for part, put in pairs if not put}
    kept = tuple(part.start for part in parts if part.start not in refused)
    return KeepResult(kept, dict(writer.refused), share)


def _computed(stack: DecoderStack, blended: PromptPass) -> Steps[tuple[FusedKV, float]]:
    """Return all tokens' KV, and the work's share of full prefill's.

    What is too little to blend is computed in full.
    """
    if blended.placed:
        done = yield from blended.steps()
        if isinstance(done, FusedPrompt):
            return done.fused, done.compute_share
    tokens = blended.token_ids
    candidates = Candidates.none(tokens.numel())
    candidates.eligible = candidates.cached.clone()
    fused = FusedKV(stack.geometry, tokens.numel())
    run = BlendPass(stack, tokens, fused, candidates, REUSE_ONLY, needs_hidden=False)
    yield from run.steps()
    return fused, 1.0
