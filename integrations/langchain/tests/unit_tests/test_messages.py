"""Messages as the engine takes them."""

from __future__ import annotations

import pytest
from cacheblend_rag.errors import PromptError
from langchain_core.messages import (
    AIMessage,
    ChatMessage,
    HumanMessage,
    SystemMessage,
    ToolCall,
    ToolMessage,
)

from langchain_cacheblend.messages import plain_text, to_openai_messages

PASSAGE = 'He said: "no".\nThen {left} \\ went.'
CALL: ToolCall = {"name": "search", "args": {"query": "río"}, "id": "1", "type": "tool_call"}
SAID = {
    "id": "1",
    "type": "function",
    "function": {"name": "search", "arguments": '{"query": "río"}'},
}


def test_messages_are_openais_and_neighbours_of_one_role_are_one() -> None:
    thought = [
        {"type": "reasoning", "reasoning": "hm"},
        {"type": "tool_use", "id": "1", "name": "search"},
    ]
    messages = [
        SystemMessage("s"),
        HumanMessage([{"type": "text", "text": "one"}, "two"]),
        HumanMessage("three", name="anna"),
        AIMessage(thought, tool_calls=[CALL]),
        ToolMessage(PASSAGE, tool_call_id="1", name="search"),
        ToolMessage([{"type": "text", "text": "more"}], tool_call_id="2"),
        AIMessage("so"),
        AIMessage(""),
        AIMessage("on"),
        ChatMessage("c", role="x"),
    ]
    assert to_openai_messages(messages) == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "one\ntwo\n\nthree"},
        {"role": "assistant", "content": "", "tool_calls": [SAID]},
        {"role": "tool", "content": PASSAGE, "tool_call_id": "1", "name": "search"},
        {"role": "tool", "content": "more", "tool_call_id": "2"},
        {"role": "assistant", "content": "so\n\non"},
        {"role": "x", "content": "c"},
    ]


def test_an_image_is_refused_by_field_in_one_line() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:..."}}
    text = {"type": "text", "text": "what is this?"}
    with pytest.raises(PromptError) as raised:
        to_openai_messages([SystemMessage("s"), HumanMessage([text, image])])
    message = str(raised.value)
    assert message.startswith("messages[1].content[1] is a block of type 'image_url'")
    assert "\n" not in message


def test_without_a_chat_template_messages_are_joined_by_blank_lines() -> None:
    told = to_openai_messages([SystemMessage("Answer."), HumanMessage("Who?")])
    assert plain_text(told) == "Answer.\n\nWho?"
