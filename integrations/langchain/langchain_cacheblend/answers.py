"""An engine's answers as LangChain's messages: text, tool calls, usage, log-probabilities."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from cacheblend_rag import Delta, Generation, PromptTooLongError, TokenLogprob
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata

from langchain_cacheblend.tool_calling import to_tool_call_chunks, to_tool_calls


class PromptOverflowError(PromptTooLongError, ContextOverflowError):
    """A prompt leaves no room for an answer within the context window; both classes catch it."""


@contextmanager
def overflow_told() -> Iterator[None]:
    """Turn PromptTooLongError into PromptOverflowError, which LangChain's handlers catch."""
    try:
        yield
    except PromptTooLongError as error:
        raise PromptOverflowError(
            error.tokens,
            error.context_window,
            at_least=error.at_least,
            answer_tokens=error.answer_tokens,
        ) from error


@dataclass(frozen=True)
class AnswerReader:
    """Reads the answers to one request. model_name: is told with each."""

    model_name: str

    def message(self, answer: Generation) -> AIMessage:
        """Return a whole answer."""
        calls, invalid = to_tool_calls(answer.tool_calls)
        metadata = self._metadata(answer)
        if answer.logprobs is not None:
            metadata["logprobs"] = _logprobs(answer.logprobs)
        return AIMessage(
            content=answer.content,
            tool_calls=calls,
            invalid_tool_calls=invalid,
            usage_metadata=_usage(answer),
            response_metadata=metadata,
        )

    def piece(self, delta: Delta) -> AIMessageChunk:
        """Return a piece of a stream; the last has the tool calls, the usage and the report.

        A call that is cut off is left out: LangChain would complete it, and run it.
        """
        told = {"logprobs": _logprobs(delta.logprobs)} if delta.logprobs else {}
        if delta.generation is None:
            return AIMessageChunk(content=delta.content, response_metadata=told)
        answer = delta.generation
        return AIMessageChunk(
            content=delta.content,
            tool_call_chunks=to_tool_call_chunks(answer.tool_calls),
            usage_metadata=_usage(answer),
            response_metadata={**told, **self._metadata(answer)},
            chunk_position="last",
        )

    def _metadata(self, answer: Generation) -> dict[str, Any]:
        return {
            "model_name": self.model_name,
            "model_provider": "cacheblend",
            "finish_reason": answer.openai_finish_reason,
            "cacheblend": answer.report.to_dict(),
        }


def _usage(answer: Generation) -> UsageMetadata:
    prompt_tokens, new_tokens = answer.prompt_tokens, len(answer.token_ids)
    return UsageMetadata(
        input_tokens=prompt_tokens,
        output_tokens=new_tokens,
        total_tokens=prompt_tokens + new_tokens,
        input_token_details=InputTokenDetails(cache_read=answer.report.reused_tokens),
    )


def _logprobs(tokens: Iterable[TokenLogprob]) -> dict[str, Any]:
    """Return log-probabilities in the form of OpenAI's API."""
    return {"content": [one.to_openai() for one in tokens], "refusal": None}
