"""Conversations that go on where vLLM's own prefix cache ends, so that nothing need be loaded."""

from __future__ import annotations

from cacheblend_rag.engines.turns import LEAST_SHARE
from cacheblend_rag.engines.vllm.protocol import BlendJob, BlendResult, SentChunk
from cacheblend_rag.engines.vllm.protocol.result import PREFIX_CACHE
from cacheblend_rag.kv.chunk_kv import chunk_id
from cacheblend_rag.prefill.prompt_pass import ALL_EXACT
from cacheblend_rag.report import ChunkReport


def goes_on(job: BlendJob) -> bool:
    """Whether all that a blend reuses is exact: vLLM's own blocks with its tokens are as good."""
    return all(chunk.exact for chunk in job.chunks)


def is_held(job: BlendJob, tokens: int, computed: int, block_size: int) -> bool:
    """Whether vLLM's prefix cache has all that a blend would load, but for a part not worth a pass.

    Args:
        job: the blend.
        tokens: of the whole prompt.
        computed: how many of the first ones vLLM's prefix cache holds.
        block_size: up to so many tokens are in no complete block, which it cannot hold.
    """
    missing = job.chunks[-1].end - computed
    return bool(computed) and missing <= max(block_size, int(LEAST_SHARE * tokens))


def gone_on(job: BlendJob, tokens: tuple[int, ...], computed: int) -> BlendResult:
    """Return the result of a blend of exact KV that vLLM's prefix cache has made needless.

    Args:
        job: the blend.
        tokens: the prompt.
        computed: how many of the first ones vLLM's prefix cache holds.
    """
    chunks, end = job.chunks, job.chunks[-1].end
    return BlendResult(
        chunks=tuple(_report(chunk, tokens, computed) for chunk in chunks),
        ratio=0.0,
        compute_share=max(0, end - computed) / end,
        selector_reason=ALL_EXACT,
        prefix_tokens=min(computed, chunks[0].start),
    )


def _report(chunk: SentChunk, tokens: tuple[int, ...], computed: int) -> ChunkReport:
    """Report the part of a chunk behind the prefix cache as recomputed, all of it as a miss."""
    is_hit, own = chunk.start < computed, chunk_id(chunk.own_tokens(tokens))
    return ChunkReport(
        own,
        chunk.start,
        chunk.end - chunk.start,
        is_hit,
        None if is_hit else "slow",
        tier=PREFIX_CACHE if is_hit else None,
        recomputed=max(0, chunk.end - computed) if is_hit else 0,
    )
