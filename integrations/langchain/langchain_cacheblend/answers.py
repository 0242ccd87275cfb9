"""An engine's answers as LangChain's messages: text, tool calls, usage, log-probabilities."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from cacheblend_rag import Delta, Generation, PromptTooLongError, TokenLogprob
from cacheblend_rag import ToolCall as EngineToolCall
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessage, AIMessageChunk, InvalidToolCall, ToolCall
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.messages.tool import invalid_tool_call, tool_call, tool_call_chunk


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


def to_message(answer: Generation, model_name: str) -> AIMessage:
    """Return a whole answer."""
    calls, invalid = to_tool_calls(answer.tool_calls)
    told = {} if answer.logprobs is None else {"logprobs": _logprobs(answer.logprobs)}
    return AIMessage(
        content=answer.content,
        tool_calls=calls,
        invalid_tool_calls=invalid,
        usage_metadata=_usage(answer),
        response_metadata={**_metadata(answer, model_name), **told},
    )


def to_piece(delta: Delta, model_name: str) -> AIMessageChunk:
    """Return a piece of a stream; the last has the tool calls, the usage and the report.

    A call that is cut off is left out: LangChain would complete it, and run it.
    """
    told = {"logprobs": _logprobs(delta.logprobs)} if delta.logprobs else {}
    answer = delta.generation
    if answer is None:
        return AIMessageChunk(content=delta.content, response_metadata=told)
    calls, _ = to_tool_calls(answer.tool_calls)
    return AIMessageChunk(
        content=delta.content,
        tool_call_chunks=[
            tool_call_chunk(name=one["name"], args=json.dumps(one["args"]), id=one["id"], index=at)
            for at, one in enumerate(calls)
        ],
        usage_metadata=_usage(answer),
        response_metadata={**told, **_metadata(answer, model_name)},
        chunk_position="last",
    )


def to_tool_calls(
    calls: Iterable[EngineToolCall],
) -> tuple[list[ToolCall], list[InvalidToolCall]]:
    """Return an answer's tool calls, and those whose arguments are no JSON object: cut off, say."""
    valid: list[ToolCall] = []
    invalid: list[InvalidToolCall] = []
    for call in calls:
        try:
            arguments = json.loads(call.arguments)
            if not isinstance(arguments, dict):
                raise TypeError(f"it is a {type(arguments).__name__}")
            valid.append(tool_call(name=call.name, args=arguments, id=call.id))
        except (ValueError, TypeError) as error:
            told = f"the arguments are no JSON object: {error}"
            invalid.append(
                invalid_tool_call(name=call.name, args=call.arguments, id=call.id, error=told)
            )
    return valid, invalid


def _metadata(answer: Generation, model_name: str) -> dict[str, Any]:
    return {
        "model_name": model_name,
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
