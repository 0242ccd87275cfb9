"""POST /v1/completions: the fields of its requests, and the form of its answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from math import isnan
from typing import TYPE_CHECKING, Any, ClassVar, cast

from pydantic import Field

from cacheblend_rag.api import fields
from cacheblend_rag.api.answers import Asked
from cacheblend_rag.api.choices import ChoicesForm
from cacheblend_rag.api.errors import bad_field
from cacheblend_rag.engines.answer import LEAST_LOGPROB, Delta, Generation, TokenLogprob
from cacheblend_rag.engines.base import Engine
from cacheblend_rag.engines.prepare import PreparedPrompt
from cacheblend_rag.engines.vllm.protocol.job import PARAMETER, Wish
from cacheblend_rag.engines.vllm.protocol.result import params_of, result_of_report
from cacheblend_rag.text.encoder import encode_plainly

if TYPE_CHECKING:
    from cacheblend_rag.api.collection import Retriever

MOST_ALTERNATIVES = 5
"""As many as the API has for completions."""
MOST_OF_ENGINES = 20
"""vLLM's own limit, for clients that want token ids in place of texts."""


class CompletionRequest(fields.ChoicesBody):
    """The body of a completion.

    Its last four fields are vLLM's, and what an engine in another process sends: the answer then
    has its tokens' ids, and the result of what it wished (``kv_transfer_params``).
    """

    prompt_field: ClassVar[str] = "prompt"
    prompt: str | list[str] | list[int] | list[list[int]]
    echo: bool | None = None
    max_tokens: int | None = Field(default=None, ge=0)
    logprobs: int | None = Field(default=None, ge=0, le=MOST_OF_ENGINES)
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    kv_transfer_params: dict[str, Any] | None = None

    def asked(self, engine: Engine, retriever: Retriever | None) -> Asked:
        """Return the prompts and settings for the engine; nothing is retrieved for them."""
        self.check()
        if self.max_tokens == 0 and not self.echo:
            raise bad_field("max_tokens", "must be at least 1, or 0 with echo")
        is_scored = self.echo and self.logprobs is not None
        if self.stream and (is_scored or self.max_tokens == 0):
            raise bad_field("stream", "does not go with a prompt's own tokens: set it to false")
        if (self.logprobs or 0) > MOST_ALTERNATIVES and not self.return_tokens_as_token_ids:
            raise bad_field("logprobs", f"must be at most {MOST_ALTERNATIVES}")
        wish = self.wish()
        config = engine.config.with_changes(**wish.config) if wish and wish.config else None
        # A prompt alone costs an answer's first token, which is not told.
        least = 1 if self.max_tokens == 0 else None
        of_prompt = self.logprobs if is_scored else None
        sampling = self.sampling(
            logprobs=self.logprobs, prompt_logprobs=of_prompt, max_tokens=least
        )
        given = self._prompts()
        prompts = [self._prepared(engine, one, wish) for one in given]
        return Asked(prompts, sampling, self.n or 1, config)

    def wish(self) -> Wish | None:
        """Return the wish of an engine in another process; raises ConfigError."""
        others = (self.kv_transfer_params or {}).keys() - {PARAMETER}
        if others:
            raise bad_field("kv_transfer_params", f"holds {min(others)}: send {PARAMETER} only")
        return Wish.from_params(self.kv_transfer_params)

    def _prepared(
        self, engine: Engine, prompt: str | list[int], wish: Wish | None
    ) -> PreparedPrompt:
        if isinstance(prompt, str) and self.add_special_tokens is False:
            prompt = list(encode_plainly(engine.tokenizer, prompt))
        if isinstance(prompt, str):
            return engine.prepare(prompt)
        key, until = ("", 0) if wish is None else (wish.conversation, wish.until)
        prepared = engine.prepare_tokens(prompt, conversation=key, until=until)
        return replace(prepared, placed=(), found=()) if wish and wish.kind != "find" else prepared

    def form(self, asked: Asked, model: str) -> CompletionForm:
        return CompletionForm(asked, model, self)

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


class CompletionForm(ChoicesForm):
    """The form of completions; body: says what an answer tells beside its text."""

    kind = "text_completion"
    chunk_kind = "text_completion"
    id_prefix = "cmpl-"

    def __init__(self, asked: Asked, model: str, body: CompletionRequest) -> None:
        super().__init__(asked, model, usage_in_stream=body.wants_usage)
        self._body, wish = body, body.wish()
        self._tells_result = wish is not None and bool(wish.report_id)
        self._lengths = Counter[int]()  # characters of each choice that logprobs have told of

    def choice(self, index: int, answer: Generation) -> dict[str, Any]:
        tokens = answer.logprobs
        scored = None if tokens is None else (*(answer.prompt_logprobs or ()), *tokens)
        told = None if scored is None else self._logprobs(scored, 0)
        text = self._echoed(index) + answer.text
        ids = self._ids(index, answer.token_ids, answer)
        return _choice(index, text, answer.finish_reason, told) | ids

    def whole(self, answers: Sequence[Generation]) -> dict[str, Any]:
        if self._body.max_tokens == 0:
            told = None if self._body.logprobs is None else ()
            nothing: Any = {"text": "", "token_ids": (), "logprobs": told}
            answers = [replace(one, finish_reason="length", **nothing) for one in answers]
        return {**super().whole(answers), **self._result(answers[0])}

    def _ids(self, index: int, new: Sequence[int], answer: Generation | None) -> dict[str, Any]:
        """Return the ids of new tokens, without one that ends the choice, if they are wanted."""
        if not self._body.return_token_ids:
            return {}
        if answer is None:
            return {"token_ids": list(new)}
        prompt = self.asked.prompts[index // self.asked.n].token_ids
        ended = "" if answer.finish_reason == "stop" else None
        return {"token_ids": list(new), "prompt_token_ids": list(prompt), "stop_reason": ended}

    def _result(self, answer: Generation | None) -> dict[str, Any]:
        if answer is None or not self._tells_result:
            return {}
        return {"kv_transfer_params": params_of(result_of_report(answer.report))}

    def _logprobs(self, tokens: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
        """Return log-probabilities; offset: where the first token's text begins."""

        def name(token_id: int, text: str) -> str:
            return f"token_id:{token_id}" if self._body.return_tokens_as_token_ids else text

        ends = accumulate((len(one.token) for one in tokens), initial=offset)
        return {
            "tokens": [name(one.token_id, one.token) for one in tokens],
            "token_logprobs": [
                None if isnan(one.logprob) else max(one.logprob, LEAST_LOGPROB) for one in tokens
            ],
            "top_logprobs": [
                None
                if isnan(one.logprob)
                else {
                    name(token, text): max(logprob, LEAST_LOGPROB)
                    for token, text, logprob in one.top
                }
                for one in tokens
            ],
            "text_offset": [*ends][:-1],
        }

    def beginning(self) -> list[bytes]:
        indices = range(len(self.asked.prompts) * self.asked.n if self._body.echo else 0)
        return [self.chunk(_choice(index, self._echoed(index))) for index in indices]

    def of_piece(self, index: int, delta: Delta) -> list[bytes]:
        answer, new = delta.generation, delta.logprobs
        if not (delta.text or new or answer):
            return []
        told = self._logprobs(new, self._lengths[index]) if new else None
        self._lengths[index] += sum(len(one.token) for one in new)
        reason = answer.finish_reason if answer else None
        ids = self._ids(index, delta.token_ids, answer)
        choice = _choice(index, delta.text, reason, told) | ids
        return [self.chunk(choice, answer, **self._result(answer))]

    def _echoed(self, index: int) -> str:
        return self.asked.prompts[index // self.asked.n].text if self._body.echo else ""


def _choice(
    index: int, text: str, reason: str | None = None, logprobs: dict[str, Any] | None = None
) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
