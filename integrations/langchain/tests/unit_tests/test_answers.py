"""Answers of an engine as LangChain's messages."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from cacheblend_rag import (
    Delta,
    Generation,
    PromptTooLongError,
    SamplingParams,
    TokenLogprob,
    ToolCall,
)
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessage, AIMessageChunk

from langchain_cacheblend import ChatCacheBlend
from langchain_cacheblend.answers import to_message, to_piece
from tests.models import random_engine

CALLS = (
    ToolCall("1", "search", '{"query": "río"}'),
    ToolCall("2", "search", '{"query": '),
    ToolCall("3", "search", '["río"]'),
)


def told(answer: Generation) -> AIMessage:
    return to_message(answer, "model")


def piece_of(delta: Delta) -> AIMessageChunk:
    return to_piece(delta, "model")


@cache
def plain() -> Generation:
    return random_engine().generate("hello", SamplingParams(max_tokens=2))


def answer(**changes: Any) -> Generation:
    return replace(plain(), text="so", content="so", finish_reason="stop", **changes)


def calling(calls: tuple[ToolCall, ...] = CALLS) -> Generation:
    return replace(plain(), content="so", tool_calls=calls, finish_reason="stop")


def test_a_call_that_is_no_json_is_told_as_invalid() -> None:
    message = told(calling())
    assert [call["args"] for call in message.tool_calls] == [{"query": "río"}]
    assert [call["id"] for call in message.invalid_tool_calls] == ["2", "3"]
    assert message.text == "so"
    assert message.response_metadata["finish_reason"] == "tool_calls"
    assert told(answer()).response_metadata["finish_reason"] == "stop"


def test_the_last_piece_of_a_stream_has_the_calls() -> None:
    pieces = [Delta("s"), Delta("o", generation=calling(CALLS[:2]))]
    whole = AIMessageChunk(content="")
    for piece in pieces:
        whole += piece_of(piece)
    message = told(calling(CALLS[:2]))
    assert whole.text == message.text == "so"
    assert whole.tool_calls == message.tool_calls
    assert [chunk["index"] for chunk in whole.tool_call_chunks] == [0]
    assert whole.usage_metadata == message.usage_metadata
    assert whole.response_metadata == message.response_metadata


def test_a_prompt_that_is_too_long_is_told_in_langchains_words() -> None:
    llm, prompt = ChatCacheBlend(engine=random_engine()), "so " * 20_000

    async def astream(prompt: str) -> None:
        await anext(llm.astream(prompt))

    for ask in (
        llm.invoke,
        lambda prompt: next(llm.stream(prompt)),
        lambda prompt: asyncio.run(llm.ainvoke(prompt)),
        lambda prompt: asyncio.run(astream(prompt)),
    ):
        with pytest.raises(ContextOverflowError) as raised:
            ask(prompt)
        assert isinstance(raised.value, PromptTooLongError)
        assert raised.value.context_window == llm.engine.context_window


def test_log_probabilities_are_told_as_by_openai() -> None:
    token = TokenLogprob(7, "é", -0.5, ((7, "é", -0.5), (8, "e", -1.5)))
    expected = {
        "token": "é",
        "bytes": [195, 169],
        "logprob": -0.5,
        "top_logprobs": [
            {"token": "é", "bytes": [195, 169], "logprob": -0.5},
            {"token": "e", "bytes": [101], "logprob": -1.5},
        ],
    }
    whole = told(answer(logprobs=(token, token)))
    assert whole.response_metadata["logprobs"] == {"content": [expected] * 2, "refusal": None}
    pieces = [
        piece_of(Delta("s", logprobs=(token,))),
        piece_of(Delta("", generation=answer(logprobs=(token, token)), logprobs=(token,))),
    ]
    assert (pieces[0] + pieces[1]).response_metadata["logprobs"] == {
        "content": [expected] * 2,
        "refusal": None,
    }
    assert "logprobs" not in told(answer()).response_metadata
