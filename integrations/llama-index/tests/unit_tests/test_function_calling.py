"""Tools in chats: what the model is told of them, and what an answer calls."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from llama_index.core.base.llms.types import (
    CachePoint,
    ChatMessage,
    MessageRole,
    TextBlock,
    ThinkingBlock,
    ToolCallBlock,
)
from llama_index.core.tools import FunctionTool

from cacheblend_rag import (
    ChatPrompt,
    ConfigError,
    Engine,
    Generation,
    PromptError,
    TokenLogprob,
    ToolCall,
)
from llama_index.llms.cacheblend import CacheBlendLLM
from llama_index.llms.cacheblend.call import plain_messages

ADD = ("add", {"a": 2, "b": 3})
SUB = ("sub", {"a": 2, "b": 3})


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def sub(a: int, b: int) -> int:
    """Subtract a number from another."""
    return a - b


TOOLS = [FunctionTool.from_defaults(add), FunctionTool.from_defaults(sub)]


@pytest.mark.parametrize(
    "fields", [{"is_chat_model": False}, {"messages_to_prompt": lambda messages: "text"}]
)
def test_what_renders_no_tools_calls_none(demo_engine: Engine, fields: dict[str, Any]) -> None:
    assert not CacheBlendLLM(engine=demo_engine, **fields).metadata.is_function_calling_model


def test_an_answer_calls_tools(ask: Any, acting: Any) -> None:
    llm, script = acting([ADD, SUB])
    history = [ChatMessage("You calculate.", role=MessageRole.SYSTEM)]
    asked_for = {"user_msg": "2+3?", "chat_history": history, "allow_parallel_tool_calls": True}
    response = ask(llm, "chat_with_tools", TOOLS, **asked_for)
    (asked,) = script.asked
    assert asked.prompt == ChatPrompt(
        [{"role": "system", "content": "You calculate."}, {"role": "user", "content": "2+3?"}],
        [tool.metadata.to_openai_tool() for tool in TOOLS],
        "auto",
    )
    blocks = response.message.blocks
    assert [(block.tool_name, block.tool_kwargs) for block in blocks] == [ADD, SUB]
    assert response.message.content is None
    assert response.raw["finish_reason"] == "tool_calls"
    assert response.raw["usage"]["prompt_tokens"] > 0
    found = llm.get_tool_calls_from_response(response)
    assert [(call.tool_name, call.tool_kwargs) for call in found] == [ADD, SUB]
    assert [call.tool_id for call in found] == ["call-1-0", "call-1-1"]
    plain = response.message.additional_kwargs["tool_calls"]
    assert [json.loads(call["function"]["arguments"]) for call in plain] == [ADD[1], SUB[1]]


def test_an_answer_that_calls_none_is_text(acting: Any) -> None:
    llm, _ = acting("Five, I think.")
    response = llm.chat_with_tools(TOOLS, "2+3?")
    assert response.message.content == "Five, I think."
    assert "tool_calls" not in response.message.additional_kwargs
    assert llm.get_tool_calls_from_response(response, error_on_no_tool_call=False) == []
    with pytest.raises(ValueError, match=r"calls no tool: .Five, I think"):
        llm.get_tool_calls_from_response(response)


@pytest.mark.parametrize("calls", [(), (ToolCall("1", "add", '{"a": 2'),)])
def test_a_call_that_is_cut_off_is_an_error(calls: tuple[ToolCall, ...], acting: Any) -> None:
    cut = {"text": '{"name": "', "content": "", "tool_calls": calls, "finish_reason": "length"}
    llm, _ = acting(lambda answer: replace(answer, **cut))
    response = llm.chat_with_tools(TOOLS, "2+3?", tool_required=True)
    with pytest.raises(ConfigError, match="max_tokens ended the call of a tool"):
        llm.get_tool_calls_from_response(response, error_on_no_tool_call=False)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "auto"),
        ({"tool_required": True}, "required"),
        ({"tool_choice": "required"}, "required"),
        ({"tool_choice": "none", "tool_required": True}, "none"),
        ({"tool_choice": "add"}, {"type": "function", "function": {"name": "add"}}),
    ],
)
def test_the_choice_of_tools(given: dict[str, Any], expected: Any, acting: Any) -> None:
    llm, script = acting([ADD], [ADD])
    llm.chat_with_tools(TOOLS, user_msg="?", **given)
    llm.chat([ChatMessage("?")], tools=TOOLS, **given)
    assert [asked.prompt.tool_choice for asked in script.asked] == [expected] * 2


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda llm: llm.chat([ChatMessage("?")], tools="add"), "tools is a str: give a list"),
        (lambda llm: llm.chat([ChatMessage("?")], tools=[add]), r"tools\[0\] is a function"),
        (lambda llm: llm.chat([ChatMessage("?")], tools=TOOLS, tool_choice="mul"), "'mul'"),
        (lambda llm: llm.chat([ChatMessage("?")], tools=[{"type": "x"}]), r"tools\[0\]\.type"),
        (lambda llm: llm.complete("?", tools=TOOLS), "a completion calls none: ask by chat"),
    ],
)
def test_wrong_tools_are_refused_in_a_line(call: Any, told: str, acting: Any) -> None:
    llm, script = acting()
    with pytest.raises((ConfigError, PromptError), match=told) as raised:
        call(llm)
    assert "\n" not in str(raised.value)
    assert script.asked == []


def test_what_tools_said_comes_back_into_the_prompt(acting: Any) -> None:
    llm, script = acting([ADD], "It is five.")
    history = [ChatMessage("2+3?")]
    first = llm.chat_with_tools(TOOLS, chat_history=history)
    history += [
        first.message,
        ChatMessage("5", role="tool", additional_kwargs={"tool_call_id": "x"}),
    ]
    again = [ChatMessage.model_validate(message.model_dump()) for message in history]
    assert llm.chat_with_tools(TOOLS, chat_history=again).message.content == "It is five."
    call = {"name": "add", "arguments": json.dumps(ADD[1])}
    assert list(script.asked[1].prompt.messages) == [
        {"role": "user", "content": "2+3?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "call-1-0", "type": "function", "function": call}],
        },
        {"role": "tool", "content": "5", "tool_call_id": "x"},
    ]


def test_other_llms_messages_are_read() -> None:
    function = {"name": "add", "arguments": '{"a": 1}'}
    call = {"id": "1", "type": "function", "function": function}
    blocks = [
        ThinkingBlock(content="Hm."),
        TextBlock(text="Adding."),
        CachePoint.model_construct(),
        ToolCallBlock(tool_call_id="1", tool_name="add", tool_kwargs={"a": 1}),
    ]
    calls = [[call], [SimpleNamespace(model_dump=lambda: call)]]
    told = [ChatMessage(role="assistant", additional_kwargs={"tool_calls": one}) for one in calls]
    told += [
        ChatMessage(role="assistant", blocks=blocks),
        ChatMessage(role="function", content="1"),
    ]
    plain = plain_messages(told)
    assert [message.get("tool_calls") for message in plain[:3]] == [[call]] * 3
    assert [message["content"] for message in plain] == ["", "", "Adding.", "1"]
    assert plain[3]["role"] == "tool"


def test_logprobs_are_told(acting: Any) -> None:
    def certain(generation: Generation) -> Generation:
        token = TokenLogprob(7, "Hö", -0.5, ((3, "Ha", -0.25), (7, "Hö", -0.5)))
        return replace(generation, logprobs=(token,))

    llm, script = acting(certain, certain, certain, "Hi.")
    for response in (
        llm.chat([ChatMessage("?")], logprobs=True, top_logprobs=2),
        llm.complete("?", logprobs=2),
        list(llm.stream_chat([ChatMessage("?")], logprobs=True))[-1],
    ):
        ((first, other),) = response.logprobs or []
        assert (first.token, first.logprob, bytes(first.bytes).decode()) == ("Hö", -0.5, "Hö")
        assert (other.token, other.logprob) == ("Ha", -0.25)
        assert response.raw["logprobs"]["content"][0]["token"] == "Hö"
    assert llm.chat([ChatMessage("?")], logprobs=False).logprobs is None
    assert [asked.sampling.logprobs for asked in script.asked] == [2, 2, 0, None]
