"""The text that a prompt's chunk KV was computed in: what blended answers are compared with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cacheblend_rag.engines.prepare import PreparedPrompt
from cacheblend_rag.prefill.comparing import Compared
from cacheblend_rag.prefill.lead_in import LeadIn
from cacheblend_rag.text.chunk import Chunk, Context


def with_reference(
    prepared: PreparedPrompt, answer: Sequence[int], lead_in: LeadIn, most_tokens: int
) -> Compared | None:
    """Return the comparison of a prompt with its reference; None if that is too long."""
    reference = reference_of(prepared, lead_in, most_tokens)
    if reference is None:
        return None
    is_prompt = reference == prepared.token_ids
    return Compared(prepared.token_ids, tuple(answer), None if is_prompt else reference)


def reference_of(
    prepared: PreparedPrompt, lead_in: LeadIn, most_tokens: int
) -> tuple[int, ...] | None:
    """Return the prompt's tokens with each contextual chunk preceded by its document's text.

    That is the text that its KV was computed after: within the document window, without what the
    reference holds already. Without contextual chunks it is the prompt. None if it would be longer
    than ``most_tokens``.
    """
    reference: list[int] = []
    held: set[Context] = set()
    done = 0
    for span, placed in zip(prepared.encoded.spans, prepared.placed, strict=True):
        reference += prepared.token_ids[done : span.start]
        if placed.protected:
            reference += _missing(span.chunk, lead_in, held)
        reference += prepared.token_ids[span.start : span.end]
        held.add(span.chunk.passage)
        done = span.end
        if len(reference) > most_tokens:
            return None
    reference += prepared.token_ids[done:]
    return tuple(reference) if len(reference) <= most_tokens else None


def _missing(chunk: Chunk, lead_in: LeadIn, held: set[Context]) -> Iterator[int]:
    """Yield the tokens of a chunk's context after the longest part of it that is held."""
    pieces = lead_in.window_of(chunk)
    ends = [index for index, (context, _) in enumerate(pieces, start=1) if context in held]
    for context, tokens in pieces[max(ends, default=0) :]:
        held.add(context)
        yield from tokens
