"""POST /v1/completions: the fields of its requests, and the form of its answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, cast

from pydantic import Field

from cacheblend_rag.api import fields
from cacheblend_rag.api.answers import Asked
from cacheblend_rag.api.choices import ChoicesForm
from cacheblend_rag.api.errors import bad_field
from cacheblend_rag.engines.answer import LEAST_LOGPROB, Delta, Generation, TokenLogprob
from cacheblend_rag.engines.base import Engine
from cacheblend_rag.engines.prepare import PreparedPrompt
from cacheblend_rag.errors import PromptTooLongError
from cacheblend_rag.text.prompt import BlendPrompt, EncodedPrompt

if TYPE_CHECKING:
    from cacheblend_rag.api.collection import Retriever

MOST_ALTERNATIVES = 5
"""As many as the API has for completions."""


class CompletionRequest(fields.ChoicesBody):
    """The body of a completion."""

    prompt_field: ClassVar[str] = "prompt"
    prompt: str | list[str] | list[int] | list[list[int]]
    echo: bool | None = None
    logprobs: int | None = Field(default=None, ge=0, le=MOST_ALTERNATIVES)

    def asked(self, engine: Engine, retriever: Retriever | None) -> Asked:
        """Return the prompts and settings for the engine; nothing is retrieved for them."""
        self.check()
        if self.echo and self.logprobs is not None:
            raise bad_field("echo", "with logprobs is not supported: leave one of them out")
        sampling = self.sampling(logprobs=self.logprobs)
        prompts = [
            engine.prepare(one) if isinstance(one, str) else of_tokens(engine, one)
            for one in self._prompts()
        ]
        return Asked(prompts, sampling, self.n or 1)

    def form(self, asked: Asked, model: str) -> CompletionForm:
        return CompletionForm(asked, model, usage_in_stream=self.wants_usage, echo=bool(self.echo))

    def _prompts(self) -> list[str] | list[list[int]]:
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


def of_tokens(engine: Engine, token_ids: Sequence[int]) -> PreparedPrompt:
    """Return a prompt of exactly these tokens.

    Chunks are found in the text that they decode to. If that text encodes to other tokens, no chunk
    is reused. Raises ApiError for what are no tokens, PromptTooLongError for too many.
    """
    tokenizer = engine.tokenizer
    if not token_ids:
        raise bad_field("prompt", "holds an empty list of token ids: give at least one")
    if len(token_ids) >= engine.context_window:
        raise PromptTooLongError(len(token_ids), engine.context_window)
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
    exact = EncodedPrompt(tuple(token_ids), ())
    return replace(
        prepared, encoded=exact, placed=(), unmatched=(), room=room, expects_chunks=False
    )


class CompletionForm(ChoicesForm):
    """The form of completions; echo: whether a text begins with its prompt."""

    kind = "text_completion"
    chunk_kind = "text_completion"
    id_prefix = "cmpl-"

    def __init__(self, asked: Asked, model: str, *, usage_in_stream: bool, echo: bool) -> None:
        super().__init__(asked, model, usage_in_stream=usage_in_stream)
        self._echo = echo
        self._lengths = Counter[int]()  # characters of each choice that logprobs have told of

    def choice(self, index: int, answer: Generation) -> dict[str, Any]:
        told = None if answer.logprobs is None else _logprobs(answer.logprobs, 0)
        return _choice(index, self._echoed(index) + answer.text, answer.finish_reason, told)

    def beginning(self) -> list[bytes]:
        indices = range(len(self.asked.prompts) * self.asked.n if self._echo else 0)
        return [self.chunk(_choice(index, self._echoed(index))) for index in indices]

    def of_piece(self, index: int, delta: Delta) -> list[bytes]:
        answer, new = delta.generation, delta.logprobs
        if not (delta.text or new or answer):
            return []
        told = _logprobs(new, self._lengths[index]) if new else None
        self._lengths[index] += sum(len(one.token) for one in new)
        reason = answer.finish_reason if answer else None
        return [self.chunk(_choice(index, delta.text, reason, told), answer)]

    def _echoed(self, index: int) -> str:
        return self.asked.prompts[index // self.asked.n].text if self._echo else ""


def _choice(
    index: int, text: str, reason: str | None = None, logprobs: dict[str, Any] | None = None
) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


def _logprobs(tokens: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
    """Return log-probabilities; offset: where the first token's text begins."""
    told, offsets = [one.to_openai() for one in tokens], list[int]()
    for one in told:
        offsets.append(offset)
        offset += len(one["token"])
    return {
        "tokens": [one["token"] for one in told],
        "token_logprobs": [one["logprob"] for one in told],
        "top_logprobs": [
            {text: max(logprob, LEAST_LOGPROB) for _, text, logprob in one.top} for one in tokens
        ],
        "text_offset": offsets,
    }
