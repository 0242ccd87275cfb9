"""What vLLM counts as cached of a blended request, as its usage tells clients."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cacheblend_rag.engines.vllm.protocol.result import BlendResult, Result

if TYPE_CHECKING:
    from vllm.v1.request import Request


def tell_reused(request: Request, result: Result | None, first: int) -> None:
    """Have vLLM count those tokens as cached that a blend reuses.

    It takes all tokens that a connector provides for cached, those that the blend computes too. As
    vLLM does, only a request's first prefill is counted: what is blended again after a preemption
    stands where the first one had cached tokens already.

    Args:
        request: vLLM's.
        result: of the blend; None before there is one.
        first: tokens that vLLM's own prefix cache had.
    """
    stats = request.prefill_stats
    if stats is None or request.num_preemptions:  # None: the first token was sent
        return
    prompt, local = stats.num_prompt_tokens, stats.num_local_cached_tokens
    reused = reused_after(result, first) if isinstance(result, BlendResult) else 0
    stats.set(prompt, local, min(reused, prompt - local))


def reused_after(result: BlendResult, first: int) -> int:
    """Return how many tokens from ``first`` on kept their stored KV.

    Which tokens of a chunk were recomputed is not known: of a part of one, its share is counted.
    """
    reused = 0.0
    for chunk in result.chunks:
        if chunk.hit:
            behind = chunk.start + chunk.tokens - max(first, chunk.start)
            reused += (chunk.tokens - chunk.recomputed) * max(0, behind) / chunk.tokens
    return int(reused)
