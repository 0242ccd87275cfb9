"""An engine's answers as LangChain's messages: text, tool calls, usage, log-probabilities."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from cacheblend_rag import Delta, Generation, TokenLogprob
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata

from langchain_cacheblend.tool_calling import to_tool_call_chunks, to_tool_calls


@dataclass(frozen=True)
class AnswerReader:
    """Reads the answers to one request.

    Args:
        model_name: is told with each.
        answer_tool: a tool that stands for the answer's form: a call of it is the answer.
        most_calls: so many tool calls are told; None is all.
    """

    model_name: str
    answer_tool: str | None = None
    most_calls: int | None = None

    def message(self, answer: Generation) -> AIMessage:
        """Return a whole answer."""
        answer = self._read(answer)
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
        """Return a piece of a stream; the last has the tool calls, the usage and the report."""
        told = {"logprobs": _logprobs(delta.logprobs)} if delta.logprobs else {}
        if delta.generation is None:
            return AIMessageChunk(content=delta.content, response_metadata=told)
        answer = self._read(delta.generation)
        is_form = answer.content != delta.generation.content  # of it nothing was streamed
        return AIMessageChunk(
            content=answer.content if is_form else delta.content,
            tool_call_chunks=to_tool_call_chunks(answer.tool_calls),
            usage_metadata=_usage(answer),
            response_metadata={**told, **self._metadata(answer)},
            chunk_position="last",
        )

    def _read(self, answer: Generation) -> Generation:
        """Return an answer whose call of the answer tool is its content."""
        calls = answer.tool_calls
        found = next((call for call in calls if call.name == self.answer_tool), None)
        if found is not None:
            return replace(answer, tool_calls=(), text=found.arguments, content=found.arguments)
        if self.most_calls is not None and len(calls) > self.most_calls:
            return replace(answer, tool_calls=calls[: self.most_calls])
        return answer

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
    content = [
        {
            **_likely(one.token, one.logprob),
            "top_logprobs": [_likely(token, logprob) for _, token, logprob in one.top],
        }
        for one in tokens
    ]
    return {"content": content, "refusal": None}


def _likely(token: str, logprob: float) -> dict[str, Any]:
    return {"token": token, "bytes": list(token.encode()), "logprob": logprob}
