"""Messages and templates as the engine reads them, and its answers as LangChain's messages."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from cacheblend_rag import (
    Delta,
    Generation,
    PromptError,
    PromptTooLongError,
    SamplingParams,
    TokenLogprob,
)
from cacheblend_rag import ToolCall as EngineCall
from langchain_core.caches import InMemoryCache
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    ChatMessage,
    HumanMessage,
    SystemMessage,
    ToolCall,
    ToolMessage,
)
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder, PromptTemplate

from langchain_cacheblend import ChatCacheBlend
from langchain_cacheblend.messages import to_message, to_openai_messages, to_piece
from langchain_cacheblend.options import prompt_instruction
from tests.models import make_tokenizer, toy_engine

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


CALLS = (
    EngineCall("1", "search", '{"query": "río"}'),
    EngineCall("2", "search", '{"query": '),
    EngineCall("3", "search", '["río"]'),
)


@cache
def plain() -> Generation:
    return toy_engine().generate("hello", SamplingParams(max_tokens=2))


def answer(**changes: Any) -> Generation:
    return replace(plain(), text="so", content="so", finish_reason="stop", **changes)


def calling(calls: tuple[EngineCall, ...] = CALLS) -> Generation:
    return replace(plain(), content="so", tool_calls=calls, finish_reason="stop")


def test_a_call_that_is_no_json_is_told_as_invalid() -> None:
    message = to_message(calling(), "model")
    assert [call["args"] for call in message.tool_calls] == [{"query": "río"}]
    assert [call["id"] for call in message.invalid_tool_calls] == ["2", "3"]
    assert message.text == "so"
    assert message.response_metadata["finish_reason"] == "tool_calls"
    assert to_message(answer(), "model").response_metadata["finish_reason"] == "stop"


def test_the_last_piece_of_a_stream_has_the_calls() -> None:
    pieces = [Delta("s"), Delta("o", generation=calling(CALLS[:2]))]
    whole = AIMessageChunk(content="")
    for piece in pieces:
        whole += to_piece(piece, "model")
    message = to_message(calling(CALLS[:2]), "model")
    assert whole.text == message.text == "so"
    assert whole.tool_calls == message.tool_calls
    assert [chunk["index"] for chunk in whole.tool_call_chunks] == [0]
    assert whole.usage_metadata == message.usage_metadata
    assert whole.response_metadata == message.response_metadata


def test_a_prompt_that_is_too_long_is_told_in_langchains_words() -> None:
    llm, prompt = ChatCacheBlend(engine=toy_engine()), "so " * 20_000

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
    whole = to_message(answer(logprobs=(token, token)), "model")
    assert whole.response_metadata["logprobs"] == {"content": [expected] * 2, "refusal": None}
    deltas = [
        Delta("s", logprobs=(token,)),
        Delta("", generation=answer(logprobs=(token, token)), logprobs=(token,)),
    ]
    first, last = (to_piece(delta, "model") for delta in deltas)
    assert (first + last).response_metadata["logprobs"] == whole.response_metadata["logprobs"]


def report_of(message: Any) -> dict[str, Any]:
    return dict(message.response_metadata["cacheblend"])


@pytest.mark.parametrize("options", [{}, {"streaming": True}])
async def test_an_answer_from_the_llm_cache_tells_no_other_calls_report(
    options: dict[str, Any],
) -> None:
    llm = ChatCacheBlend(engine=toy_engine(), max_tokens=2, cache=InMemoryCache(), **options)
    kept = llm.generate([[HumanMessage("hello")]])
    first = kept.generations[0][0].message
    asked = [llm.invoke("hello"), *llm.batch(["hello"]), await llm.ainvoke("hello")]
    assert [report_of(message) for message in asked] == [{"cached": True}] * 3
    assert {message.text for message in asked} == {first.text}
    assert asked[0].response_metadata["finish_reason"] == "length"
    assert report_of(first)["seconds"]
    assert report_of(llm.invoke("hello", max_tokens=1))["seconds"]


def test_a_model_without_a_chat_template_reads_plain_text() -> None:
    engine = toy_engine(chat_template=False)
    llm = ChatCacheBlend(engine=engine, max_tokens=8)
    answer = llm.invoke([SystemMessage("Answer."), HumanMessage("Who?")])
    plain = engine.generate_full("Answer.\n\nWho?", SamplingParams(max_tokens=8))
    assert answer.text == plain.text


def test_the_chat_template_is_part_of_it() -> None:
    prompt = ChatPromptTemplate.from_messages(
        [("system", "Answer."), ("human", "Context:\n{context}\n\nQuestion: {input}")]
    )
    assert prompt_instruction(prompt, make_tokenizer()) == "<bos>Answer.\n\nContext:\n"
    assert prompt_instruction(prompt, make_tokenizer(chat_template=False)) == (
        "Answer.\n\nContext:\n"
    )


def test_it_ends_at_the_first_variable_whatever_that_is() -> None:
    prompt = ChatPromptTemplate.from_messages(
        [("system", "Answer {user}."), MessagesPlaceholder("history"), ("human", "{context}")]
    )
    tokenizer = make_tokenizer(chat_template=False)
    assert prompt_instruction(prompt, tokenizer) == "Answer "
    assert prompt_instruction(prompt.partial(user="Anna"), tokenizer) == "Answer Anna.\n\n"


def test_plain_and_jinja_templates_count_too() -> None:
    tokenizer = make_tokenizer(chat_template=False)
    prompt = PromptTemplate.from_template("Use this.\n{context}\nQuestion: {input}")
    assert prompt_instruction(prompt, tokenizer) == "Use this.\n"
    jinja = PromptTemplate.from_template(
        'Reply as {"a": 1}. {{ context }}', template_format="jinja2"
    )
    assert prompt_instruction(jinja, tokenizer) == 'Reply as {"a": 1}. '
