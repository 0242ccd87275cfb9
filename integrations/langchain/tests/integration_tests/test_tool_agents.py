"""Agents whose own model is ChatCacheBlend: it calls a retriever tool, and answers from its KV."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import ModelRequest, ModelResponse, wrap_model_call
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage
from pydantic import BaseModel

from langchain_cacheblend import CacheBlendChatMessageHistory, CacheBlendTransformer, ChatCacheBlend
from langchain_cacheblend.middleware import CacheBlendMiddleware
from tests.models import random_engine
from tests.scripted import Asked, Call, scripted
from tests.search_tool import search_tool

CHUNKS = [
    Document(page_content=f"Part {i} says {{this}}: " + text * 8, metadata={"source": "report"})
    for i, text in enumerate(["the river is quiet. ", "the tower is old. ", "she left Rome. "])
]
NEW = Document(page_content="A page just read from the web: the bridge is closed. " * 6)


class Place(BaseModel):
    """Where she is."""

    town: str


def script(asked: Asked) -> str | Call | None:
    """Search once, then give the answer by a tool for it, if there is one, or in its form."""
    if asked.role == "user":
        return "search", {"query": "river"}
    if "Place" in asked.tools:
        return "Place", {"town": "Rome"}
    return '{"town": "Rome"}' if asked.has_form else None


@pytest.fixture
def llm() -> Iterator[ChatCacheBlend]:
    engine = scripted(random_engine(recompute_ratio=0.0), script)
    CacheBlendTransformer(engine=engine).transform_documents(CHUNKS)
    yield ChatCacheBlend(engine=engine, max_tokens=64)
    engine.close()


def ask(agent: Any, *before: BaseMessage) -> list[BaseMessage]:
    messages = [*before, HumanMessage("Is the river quiet?")]
    return list(agent.invoke({"messages": messages})["messages"])[len(before) :]


def hits(message: BaseMessage) -> list[bool]:
    return [chunk["hit"] for chunk in message.response_metadata["cacheblend"]["chunks"]]


def test_an_agent_answers_from_the_stored_kv_of_what_its_tool_found(llm: ChatCacheBlend) -> None:
    agent = create_agent(
        llm, [search_tool(CHUNKS, "content")], system_prompt="Answer from what you find."
    )
    messages = ask(agent)
    assert [type(m) for m in messages] == [HumanMessage, AIMessage, ToolMessage, AIMessage]
    assert messages[1].response_metadata["finish_reason"] == "tool_calls"
    assert hits(messages[-1]) == [True] * 3
    passages = sum(llm.get_num_tokens(chunk.page_content) for chunk in CHUNKS)
    usage = messages[-1].usage_metadata
    assert usage["input_token_details"]["cache_read"] >= passages - 3  # joined at edges
    again = ask(agent, *messages)
    assert hits(again[-1]) == [True] * 6


async def test_asynchronous_and_streaming_agents_answer_the_same(llm: ChatCacheBlend) -> None:
    agent = create_agent(llm, [search_tool(CHUNKS, "content")])
    expected = ask(agent)[-1]
    outcome = await agent.ainvoke({"messages": [HumanMessage("Is the river quiet?")]})
    assert outcome["messages"][-1].text == expected.text
    pieces = [
        piece
        for piece, _ in agent.stream(
            {"messages": [HumanMessage("Is the river quiet?")]}, stream_mode="messages"
        )
    ]
    assert "".join(p.text for p in pieces if isinstance(p, AIMessage)) == expected.text
    assert [p.name for p in pieces if isinstance(p, ToolMessage)] == ["search"]


def test_documents_no_index_knows_are_reused_with_the_middleware(llm: ChatCacheBlend) -> None:
    tool = search_tool([NEW, CHUNKS[0]])
    agent = create_agent(llm, [tool], middleware=[CacheBlendMiddleware(llm)])
    assert hits(ask(agent)[-1]) == [True, True]


@pytest.mark.parametrize("strategy", [Place, ToolStrategy(Place), ProviderStrategy(Place)])
def test_an_agent_with_a_format_searches_and_answers_in_it(
    llm: ChatCacheBlend, strategy: Any
) -> None:
    agent = create_agent(
        llm,
        [search_tool(CHUNKS, "content")],
        middleware=[CacheBlendMiddleware(llm)],
        response_format=strategy,
    )
    outcome = agent.invoke({"messages": [HumanMessage("Where is she?")]})
    assert outcome["structured_response"] == Place(town="Rome")
    calls = [m for m in outcome["messages"] if isinstance(m, AIMessage)]
    assert calls[0].tool_calls[0]["name"] == "search"
    assert hits(calls[1]) == [True] * 3


@wrap_model_call
def search_first(
    request: ModelRequest[Any], handler: Callable[[ModelRequest[Any]], ModelResponse[Any]]
) -> ModelResponse[Any]:
    """A model of this size calls a tool if it must."""
    asked = isinstance(request.messages[-1], HumanMessage)
    return handler(request.override(tool_choice="search" if asked else "none"))


def test_a_sessions_turns_are_reused_where_tools_are_called(llm: ChatCacheBlend) -> None:
    history = CacheBlendChatMessageHistory(llm)
    agent = create_agent(llm, [search_tool(CHUNKS, "content")])
    with history.reused():
        first = ask(agent)
        second = ask(agent, *first)
    assert first[1].tool_calls
    assert second[1].tool_calls
    passages = [chunk.page_content for chunk in CHUNKS]
    assert [found.text for found in second if isinstance(found, ToolMessage)] == [
        "\n\n".join(passages)
    ]
    assert len(hits(second[-1])) > 2 * len(passages)  # turns, beside the passages
    assert all(hits(second[-1]))
