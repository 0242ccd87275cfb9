"""What every engine does alike with the turns of a conversation, before and after an answer."""

from __future__ import annotations

from collections.abc import Sequence

from cacheblend_rag.engines.answer import Request
from cacheblend_rag.engines.prepare import PreparedPrompt
from cacheblend_rag.prefill.conversation_kv import AnsweredPrompt
from cacheblend_rag.prefill.lead_in import PlacedChunk
from cacheblend_rag.prefill.prefix import BLOCK_TOKENS
from cacheblend_rag.report import ChunkReport
from cacheblend_rag.settings import BlendConfig

LEAST_SHARE = 1 / 8
"""Smallest share of a prompt that exact KV must have to be reused by itself: below it, the overhead
of a blend pass may exceed the computation saved."""


def parts_of(request: Request) -> tuple[PlacedChunk, ...]:
    """Return the chunks of a prompt, and the parts of its conversation that may be reused."""
    prompt = request.prepared
    return prompt.stored_parts if request.config.reuse_prefix else prompt.placed


def config_for(config: BlendConfig, parts: Sequence[PlacedChunk], tokens: int) -> BlendConfig:
    """Return a request's config, without ``min_tokens`` if all that can be reused is exact.

    It must be enough to be worth a pass all the same, as a stored prefix must.

    Args:
        config: the request's.
        parts: what can be reused.
        tokens: of the whole prompt.
    """
    held = sum(part.end - part.start for part in parts)
    is_exact = bool(parts) and all(part.is_exact for part in parts)
    is_enough = held >= max(1, LEAST_SHARE * tokens)
    return config.with_changes(min_tokens=0) if is_exact and is_enough else config


def hits_of(prompt: PreparedPrompt, chunks: Sequence[ChunkReport]) -> tuple[PlacedChunk, ...]:
    """Return the parts of a prompt whose KV was reused, in order; chunks: its reports."""
    hits = {chunk.start for chunk in chunks if chunk.hit}
    return tuple(part for part in prompt.stored_parts if part.start in hits)


def answered_prompt(
    prompt: PreparedPrompt,
    chunks: Sequence[ChunkReport],
    held: Sequence[int],
    *,
    is_exact: bool,
    token_bytes: int,
) -> AnsweredPrompt:
    """Return what a conversation keeps KV of after an answer.

    Parts of earlier turns that were missed are kept again unless they are still stored, chunks
    never are.

    Args:
        prompt: a conversation's.
        chunks: the reports of its parts.
        held: the tokens whose KV can be kept: of the prompt, and of the answer as far as known.
        is_exact: whether stored KV stays as it was computed.
        token_bytes: of one token's KV.
    """
    stored = {chunk.start for chunk in chunks if chunk.hit or chunk.reason == "slow"}
    taken = [part for part in prompt.stored_parts if not part.is_turn or part.start in stored]
    inexact = [part.start for part in hits_of(prompt, chunks) if not part.is_exact]
    return AnsweredPrompt(
        token_ids=held,
        begin=(prompt.shared_tokens or 0) // BLOCK_TOKENS * BLOCK_TOKENS,
        taken=[(part.start, part.end) for part in taken],
        exact_until=min(inexact, default=len(held)) if is_exact else -1,
        fingerprint=prompt.prepared_for.fingerprint,
        token_bytes=token_bytes,
    )
