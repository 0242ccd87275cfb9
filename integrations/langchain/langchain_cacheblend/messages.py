"""Messages, tools and forms of answers as an engine takes them, and its answers as messages."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from cacheblend_rag import (
    ConfigError,
    Delta,
    Generation,
    PromptError,
    PromptTooLongError,
    StructuredOutputs,
    TokenLogprob,
    read_arguments,
)
from cacheblend_rag import ToolCall as EngineToolCall
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    InvalidToolCall,
    ToolCall,
    ToolMessage,
    convert_to_openai_messages,
)
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.messages.tool import invalid_tool_call, tool_call, tool_call_chunk
from langchain_core.utils.function_calling import (
    convert_to_openai_function,
    convert_to_openai_tool,
)

SEPARATOR = "\n\n"
NOT_SHOWN = frozenset(
    {"tool_call", "tool_call_chunk", "invalid_tool_call", "tool_use", "function_call"}
    | {"reasoning", "thinking", "redacted_thinking"}
)
"""Blocks of an AI message that are no text: calls stand beside it, and reasoning is left out."""
PLAIN = {"role", "content"}
Tool = dict[str, Any]
KNOWN = ("name", "description", "parameters")
"""What a tool in the OpenAI form says of its function."""
ANSWER = "answer"
"""The name of a form that has none."""
FORMATS = (
    "{'type': 'text'}, {'type': 'json_object'}, {'type': 'json_schema', 'json_schema': {'name': "
    "..., 'schema': ...}}, a Pydantic class, a TypedDict or a JSON schema"
)


def to_openai_messages(messages: Sequence[BaseMessage]) -> list[dict[str, Any]]:
    """Return messages in the OpenAI form, with calls of tools, and results as such.

    Neighbours of one role without calls are joined by a blank line; an AI message without text or
    calls is left out. Raises PromptError, naming the field, when a message holds anything but text.
    """
    found: list[dict[str, Any]] = []
    for index, message in enumerate(messages):
        text = _text(message, f"messages[{index}]")
        said: Any = convert_to_openai_messages(message.model_copy(update={"content": text}))
        if not isinstance(message, ToolMessage):
            said.pop("name", None)
        if isinstance(message, AIMessage) and not text and not said.get("tool_calls"):
            continue
        last = found[-1] if found else {}
        if said.keys() == last.keys() == PLAIN and said["role"] == last["role"]:
            last["content"] += SEPARATOR + text
        else:
            found.append(said)
    return found


def plain_text(messages: Sequence[dict[str, Any]]) -> str:
    """Return OpenAI's messages as one text for a model without a chat template."""
    return SEPARATOR.join(message["content"] for message in messages if message["content"])


def _text(message: BaseMessage, name: str) -> str:
    if isinstance(message.content, str):
        return message.content
    skipped = NOT_SHOWN if isinstance(message, AIMessage) else frozenset()
    texts = []
    for index, block in enumerate(message.content):
        if isinstance(block, str):
            texts.append(block)
        elif (kind := block.get("type")) == "text" and isinstance(block.get("text"), str):
            texts.append(block["text"])
        elif kind not in skipped:
            raise PromptError(
                f"{name}.content[{index}] is a block of type {kind!r}: this model reads text "
                "blocks only"
            )
    return "\n".join(texts)


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
    told = "the arguments are no JSON object"
    for call in calls:
        if (read := read_arguments(call)) is not None:
            valid.append(tool_call(name=call.name, args=read, id=call.id))
        else:
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


# Tools and forms of answers


def to_engine_tools(tools: Any, strict: bool | None = None) -> list[Tool]:
    """Return tools in the OpenAI form.

    Args:
        tools: functions, BaseTools, Pydantic classes, TypedDicts, or dicts of any form that
            ``convert_to_openai_tool`` reads.
        strict: True closes the objects of their schemas, as in ``convert_to_openai_tool``.

    Raises:
        ConfigError: in one line that names the tool, when one is no function.
    """
    if isinstance(tools, str | Mapping) or not isinstance(tools, Sequence):
        raise ConfigError(f"tools is a {type(tools).__name__}: give a list of functions or tools")
    return [_to_engine_tool(tool, f"tools[{index}]", strict) for index, tool in enumerate(tools)]


def _to_engine_tool(tool: Any, name: str, strict: bool | None) -> Tool:
    try:
        found = convert_to_openai_tool(tool, strict=strict)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"{name} is a {type(tool).__name__} that describes no function: give a tool, a "
            "function with a docstring, a Pydantic class, or a dict with name and parameters"
        ) from error
    if found.get("type") != "function":
        raise ConfigError(f"{name} is of type {found.get('type')!r:.40}: give a function to call")
    function = found.get("function", found)
    return {
        "type": "function",
        "function": {key: function[key] for key in KNOWN if key in function},
    }


def to_response_format(schema: Any, strict: bool | None = None) -> dict[str, Any]:
    """Return a ``response_format`` in the OpenAI form.

    Args:
        schema: one already, its inner ``{"name": ..., "schema": ...}``, a Pydantic class, a
            TypedDict or a JSON schema.
        strict: True closes the schema's objects, as in ``convert_to_openai_function``.

    Raises:
        ConfigError: when it is none of them.
    """
    if isinstance(schema, Mapping):
        if schema.get("type") in ("text", "json_object", "json_schema"):
            StructuredOutputs.of_response_format(schema)
            return dict(schema)
        if "name" in schema and "schema" in schema:
            return {"type": "json_schema", "json_schema": dict(schema)}
        if "name" not in schema and "title" not in schema:
            schema = {"title": ANSWER, **schema}
    try:
        function = convert_to_openai_function(schema, strict=strict)
        named = {"name": function["name"], "schema": function["parameters"]}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"response_format={schema!r:.80} must be {FORMATS}") from error
    return {"type": "json_schema", "json_schema": named}
