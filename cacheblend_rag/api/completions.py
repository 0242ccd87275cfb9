"""The route POST /v1/completions: the fields of its requests, and the form of its answers."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from cacheblend_rag.api import fields
from cacheblend_rag.api.answers import Asked, Pieces, usage
from cacheblend_rag.api.logprobs import completion_logprobs
from cacheblend_rag.api.openai_errors import ApiError, bad_field
from cacheblend_rag.api.serving import Serving
from cacheblend_rag.api.sources import extra_of
from cacheblend_rag.api.wire import DONE, event
from cacheblend_rag.engines.answer import Generation
from cacheblend_rag.engines.prepare import PreparedPrompt
from cacheblend_rag.text.prompt import BlendPrompt, EncodedPrompt

MOST_ALTERNATIVES = 5
"""As many as the API has for completions."""


class CompletionRequest(fields.Request):
    """The body of a completion."""

    prompt: str | list[str] | list[int] | list[list[int]]
    echo: bool | None = None
    logprobs: int | None = Field(default=None, ge=0, le=MOST_ALTERNATIVES)

    def prompts(self) -> list[str] | list[list[int]]:
        """Return the prompts, texts or token ids; raises ApiError when there are none."""
        given = cast(Any, self.prompt)
        if isinstance(given, str) or (given and isinstance(given[0], int)):
            given = [given]
        if not given:
            raise bad_field("prompt", "is empty: give a text, token ids, or a list of them")
        if len(given) * (self.n or 1) > fields.MOST_ANSWERS:
            raise bad_field(
                "prompt", f"times n are more than {fields.MOST_ANSWERS} answers: send fewer"
            )
        return list(given)


async def respond(serving: Serving, request: HttpRequest, body: CompletionRequest) -> Response:
    """Answer a request; raises ApiError."""

    async def ask() -> Asked:
        serving.check_model(body.model)
        body.check()
        if body.echo and body.logprobs is not None:
            raise bad_field("echo", "with logprobs is not supported: leave one of them out")
        sampling = body.sampling(logprobs=body.logprobs)
        prompts = [await _prepared(serving, prompt) for prompt in body.prompts()]
        return Asked(prompts, sampling, body.n or 1)

    form = CompletionForm(
        serving.name, n=body.n or 1, usage_in_stream=body.wants_usage, echo=bool(body.echo)
    )
    return await serving.respond(request, ask, form, streamed=bool(body.stream))


async def _prepared(serving: Serving, prompt: str | list[int]) -> PreparedPrompt:
    if isinstance(prompt, str):
        return await serving.prepare(prompt)
    return await asyncio.to_thread(_of_tokens, serving, prompt)


def _of_tokens(serving: Serving, token_ids: Sequence[int]) -> PreparedPrompt:
    """Return a prompt of exactly these tokens.

    Chunks are found in the text that they decode to. If that text encodes to other tokens, no chunk
    is reused.
    """
    tokenizer, engine = serving.engine.tokenizer, serving.engine
    if not token_ids:
        raise bad_field("prompt", "holds an empty list of token ids: give at least one")
    if not all(0 <= token < len(tokenizer) for token in token_ids):
        raise bad_field("prompt", f"holds a token id outside 0 to {len(tokenizer) - 1}")
    text = tokenizer.decode(
        list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    segmented = BlendPrompt.from_text(text, engine.registry) if text else BlendPrompt.of(" ")
    prepared = engine.prepare(replace(segmented, is_rendered=True))
    if prepared.token_ids == tuple(token_ids):
        return prepared
    room = engine.context_window - len(token_ids)
    if room < 1:
        from cacheblend_rag.errors import PromptTooLongError

        raise PromptTooLongError(len(token_ids), engine.context_window)
    exact = EncodedPrompt(tuple(token_ids), ())
    return replace(
        prepared, encoded=exact, placed=(), unmatched=(), room=room, expects_chunks=False
    )


@dataclass
class CompletionForm:
    """The form of completions; arguments as for ChatForm.

    echo: whether a text begins with its prompt.
    """

    model: str
    n: int
    usage_in_stream: bool
    echo: bool
    prompt_field: str = "prompt"
    id: str = field(default_factory=lambda: f"cmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, asked: Asked, answers: Sequence[Generation]) -> dict[str, Any]:
        """Return the body of an answer."""
        choices = []
        for index, answer in enumerate(answers):
            text = self._echoed(asked, index) + answer.text
            told = None if answer.logprobs is None else completion_logprobs(answer.logprobs, 0)
            choices.append(self._choice(index, text, answer.finish_reason, told))
        return {
            **self._head(),
            "choices": choices,
            "usage": usage(answers, self.n),
            "cacheblend": extra_of(asked, answers),
        }

    async def events(self, asked: Asked, pieces: Pieces) -> AsyncGenerator[bytes, None]:
        """Yield the events of a streamed answer."""
        count = len(asked.prompts) * self.n
        told, length = [0] * count, [0] * count
        if self.echo:
            for index in range(count):
                yield self._event(index, self._echoed(asked, index), None)
        async for piece in pieces:
            delta, index = piece.delta, piece.index
            answer, new = delta.generation, delta.logprobs
            if answer is not None and answer.logprobs is not None:
                new = answer.logprobs[told[index] :]
            told[index] += len(new)
            if not (delta.text or new or answer):
                continue
            lines = completion_logprobs(new, length[index]) if new else None
            length[index] += sum(len(one.token) for one in new)
            extra = {} if answer is None else {"cacheblend": extra_of(asked, [answer])}
            reason = None if answer is None else answer.finish_reason
            yield self._event(index, delta.text, reason, lines, **extra)
        if self.usage_in_stream:
            counted = usage(pieces.in_order(), self.n)
            yield event({**self._head(), "choices": [], "usage": counted})
        yield DONE

    def failure(self, error: ApiError) -> bytes:
        """Return the event for an error after the first one."""
        return event(error.body()) + DONE

    def _event(
        self,
        index: int,
        text: str,
        reason: str | None,
        logprobs: dict[str, Any] | None = None,
        **extra: Any,
    ) -> bytes:
        chunk = {**self._head(), "choices": [self._choice(index, text, reason, logprobs)], **extra}
        return event({**chunk, "usage": None} if self.usage_in_stream else chunk)

    @staticmethod
    def _choice(
        index: int, text: str, reason: str | None, logprobs: dict[str, Any] | None
    ) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _echoed(self, asked: Asked, index: int) -> str:
        prompt = asked.prompts[index // self.n]
        return prompt.text if self.echo and isinstance(prompt, PreparedPrompt) else ""

    def _head(self) -> dict[str, Any]:
        kind = "text_completion"
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}
