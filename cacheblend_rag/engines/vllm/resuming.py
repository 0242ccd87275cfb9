"""Streams that go on at another replica when the server that wrote them dies."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import TypeVar, cast

from cacheblend_rag.engines.sampling import ResolvedSampling
from cacheblend_rag.engines.vllm.transport import (
    Piece,
    StreamBrokenError,
    Transport,
    VLLMRequest,
)
from cacheblend_rag.errors import EngineUnavailableError

Decode = Callable[[Sequence[int]], str]
Told = TypeVar("Told", str, list[int])

CONTEXT_TOKENS = 8
"""Tokens before an answer that its first token is decoded after, as vLLM does."""
INCOMPLETE = "\ufffd"
"""What a tokenizer writes for the first bytes of a character whose last ones are missing."""


async def resumed_stream(
    transport: Transport, request: VLLMRequest, decode: Decode
) -> AsyncIterator[Piece]:
    """Answer a request piece by piece; a greedy answer that breaks off is continued.

    The prompt and the tokens of the answer so far are sent again, at most ``max_resumes`` times.
    What was yielded stays as it is, and no character or token is yielded twice. The continuation is
    the greedy one of the same tokens: exactly what the other server would have written if both
    compute the same logits, which they do, but for rounding, with ordinary prefill or a recompute
    ratio of 1. With a smaller ratio the rows to recompute are chosen for the longer prompt.

    Text that ends within a character, or that vLLM holds back since a stop string may begin in it,
    belongs to tokens that are sent only once it was yielded; until then they are generated again.

    decode: returns the text of tokens, without special ones.

    Raises EngineUnavailableError when a sampled, penalized or structured answer breaks off after
    its first token, since another server would write other tokens; when the other server repeats
    different text; and when no server answers.
    """
    answer, asked = _Answer(), request
    left = transport.max_resumes
    while True:
        try:
            sent = cast("AsyncGenerator[Piece]", transport.send(asked, stream=True))
            async with aclosing(sent) as pieces:
                async for piece in pieces:
                    yield answer.take(piece)
            return
        except StreamBrokenError as error:
            refusal = _refusal(error, request, answer, left)
            if refusal is not None:
                transport.counts.broken += 1
                raise refusal from None
        left -= 1
        if answer.ids:
            transport.counts.resumed += 1
        else:
            transport.counts.retried += 1
        kept = answer.keep(request, decode)
        asked = replace(
            request,
            token_ids=(*request.token_ids, *kept),
            sampling=replace(request.sampling, max_tokens=request.sampling.max_tokens - len(kept)),
        )


def _refusal(
    error: StreamBrokenError, request: VLLMRequest, answer: _Answer, left: int
) -> EngineUnavailableError | None:
    """Return why a broken stream is not continued, None if it is."""
    if answer.ids and (kind := _no_continuation(request.sampling)):
        return EngineUnavailableError(
            f"{error} after token {len(answer.ids)} of {kind}, which no other server would "
            "continue: ask again, or with temperature=0 and free text, whose streams are resumed"
        )
    return error if left <= 0 else None


def _no_continuation(sampling: ResolvedSampling) -> str:
    """Return why the rest of an answer does not follow from its tokens so far, "" if it does."""
    if sampling.temperature > 0:
        return "a sampled answer"
    if sampling.structured_outputs is not None:
        return "an answer with structured_outputs"
    penalized = sampling.presence_penalty or sampling.frequency_penalty
    return "an answer with penalties" if penalized else ""


class _Answer:
    """What was yielded of an answer, and what a server that continues it repeats of that.

    ids: its tokens. text: its text, which may lack that of the last tokens.
    """

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.text = ""
        self._repeated_ids: list[int] = []
        self._repeated_text = ""

    def keep(self, request: VLLMRequest, decode: Decode) -> tuple[int, ...]:
        """Return the tokens to send again; those after them are going to be repeated.

        They are the most tokens whose text was yielded and ends with a whole character.
        """
        before = request.token_ids[-CONTEXT_TOKENS:]
        opening = decode(before)
        most = min(len(self.ids), request.sampling.max_tokens - 1)
        kept, own = 0, ""
        for count in range(most, 0, -1):
            whole = decode((*before, *self.ids[:count]))
            told = whole[len(opening) :]
            fits = whole.startswith(opening) and self.text.startswith(told)
            if fits and not told.endswith(INCOMPLETE):
                kept, own = count, told
                break
        self._repeated_ids = self.ids[kept:]
        self._repeated_text = self.text[len(own) :]
        return tuple(self.ids[:kept])

    def take(self, piece: Piece) -> Piece:
        """Return what is new in a piece; raises EngineUnavailableError if it repeats wrongly."""
        ids, self._repeated_ids = _new(list(piece.token_ids), self._repeated_ids)
        text, self._repeated_text = _new(piece.text, self._repeated_text)
        if piece.finish_reason and (self._repeated_ids or self._repeated_text):
            raise _different()
        self.ids += ids
        self.text += text
        logprobs = piece.logprobs[len(piece.token_ids) - len(ids) :]
        return replace(piece, token_ids=tuple(ids), text=text, logprobs=logprobs)


def _new(told: Told, repeated: Told) -> tuple[Told, Told]:
    """Return what is told beyond what is to be repeated, and what of that is still to come."""
    count = min(len(told), len(repeated))
    if told[:count] != repeated[:count]:
        raise _different()
    return told[count:], repeated[count:]


def _different() -> EngineUnavailableError:
    return EngineUnavailableError(
        "an answer that broke off was not continued, since the other server writes another one: "
        "ask again, or with recompute_ratio=1, which all servers answer alike"
    )
