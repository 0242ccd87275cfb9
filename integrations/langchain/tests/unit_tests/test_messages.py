"""Messages as the engine takes them."""

from __future__ import annotations

import pytest
from cacheblend_rag.errors import PromptError
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    ChatMessage,
    HumanMessage,
    SystemMessage,
    ToolCall,
    ToolMessage,
)

from langchain_cacheblend.messages import plain_text, to_chat_messages, to_engine_messages


def test_roles_are_those_of_chat_templates() -> None:
    messages = [SystemMessage("s"), HumanMessage("h"), AIMessage("a"), ChatMessage("c", role="x")]
    assert to_engine_messages(messages) == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "h"},
        {"role": "assistant", "content": "a"},
        {"role": "x", "content": "c"},
    ]


def test_neighbours_of_one_role_become_one_message() -> None:
    messages = [HumanMessage("one"), HumanMessage("two", name="anna"), AIMessageChunk(content="a")]
    assert to_engine_messages(messages) == [
        {"role": "user", "content": "one\n\ntwo"},
        {"role": "assistant", "content": "a"},
    ]


def test_what_a_tool_returned_stands_word_for_word_in_a_users_message() -> None:
    passage = 'He said: "no".\nThen {left} \\ went.'
    call = {"name": "search", "args": {}, "id": "1"}
    messages = [
        HumanMessage("who?"),
        AIMessage(content=[{"type": "tool_use", "id": "1", "name": "search"}], tool_calls=[call]),
        ToolMessage(passage, tool_call_id="1"),
    ]
    assert to_engine_messages(messages) == [{"role": "user", "content": f"who?\n\n{passage}"}]


def test_text_blocks_are_read() -> None:
    blocks = [{"type": "text", "text": "one"}, "two", {"type": "text", "text": "three"}]
    assert to_engine_messages([HumanMessage(blocks)]) == [
        {"role": "user", "content": "one\ntwo\nthree"}
    ]


def test_thoughts_of_a_model_are_not_repeated_to_it() -> None:
    blocks = [{"type": "reasoning", "reasoning": "hm"}, {"type": "text", "text": "yes"}]
    assert to_engine_messages([AIMessage(blocks)]) == [{"role": "assistant", "content": "yes"}]


def test_an_image_is_refused_by_field_in_one_line() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:..."}}
    text = {"type": "text", "text": "what is this?"}
    with pytest.raises(PromptError) as raised:
        to_engine_messages([SystemMessage("s"), HumanMessage([text, image])])
    message = str(raised.value)
    assert message.startswith("messages[1].content[1] is a block of type 'image_url'")
    assert "\n" not in message


def test_without_a_chat_template_messages_are_joined_by_blank_lines() -> None:
    assert plain_text([SystemMessage("Answer."), HumanMessage("Who?")]) == "Answer.\n\nWho?"
    assert plain_text([HumanMessage("Who?")]) == "Who?"


CALL: ToolCall = {"name": "search", "args": {"query": "río"}, "id": "1", "type": "tool_call"}
SAID = {
    "id": "1",
    "type": "function",
    "function": {"name": "search", "arguments": '{"query": "río"}'},
}


def test_where_tools_are_called_calls_and_results_are_openais() -> None:
    passage = 'He said: "no".\nThen {left} \\ went.'
    messages = [
        SystemMessage("s"),
        HumanMessage("one"),
        HumanMessage("two"),
        AIMessage("", tool_calls=[CALL]),
        ToolMessage(passage, tool_call_id="1", name="search"),
        ToolMessage([{"type": "text", "text": "more"}], tool_call_id="2"),
        AIMessage("so"),
        AIMessage(""),
        AIMessage("on"),
    ]
    assert to_chat_messages(messages) == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "one\n\ntwo"},
        {"role": "assistant", "content": "", "tool_calls": [SAID]},
        {"role": "tool", "content": passage, "tool_call_id": "1", "name": "search"},
        {"role": "tool", "content": "more", "tool_call_id": "2"},
        {"role": "assistant", "content": "so\n\non"},
    ]


def test_a_call_stands_in_no_text_twice() -> None:
    blocks = [{"type": "text", "text": "hm"}, {"type": "tool_use", "id": "1", "name": "search"}]
    assert to_chat_messages([AIMessage(blocks, tool_calls=[CALL]), AIMessage("so")]) == [
        {"role": "assistant", "content": "hm", "tool_calls": [SAID]},
        {"role": "assistant", "content": "so"},
    ]
