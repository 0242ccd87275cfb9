"""Agents look passages up with a tool, and ChatCacheBlend answers from their stored KV.

The calls of tools are scripted, of ChatCacheBlend or of another model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import pytest
from cacheblend_rag import ConfigError
from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_core.documents import Document
from langchain_core.language_models import FakeMessagesListChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage
from langchain_core.runnables import Runnable, RunnableLambda
from langchain_core.tools import BaseTool, create_retriever_tool, tool
from pydantic import BaseModel

from langchain_cacheblend import CacheBlendChatMessageHistory, CacheBlendTransformer, ChatCacheBlend
from langchain_cacheblend.middleware import CacheBlendMiddleware
from tests.models import toy_engine
from tests.scripted import Asked, Call, scripted

CHUNKS = [
    Document(page_content=f"Part {i} says {{this}}: " + text * 8, metadata={"source": "report"})
    for i, text in enumerate(["the river is quiet. ", "the tower is old. ", "she left Rome. "])
]
CALL: Any = {"name": "search", "args": {"query": "river"}, "id": "1", "type": "tool_call"}
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


class ToolCaller(FakeMessagesListChatModel):
    """Another model, whose messages are given."""

    def bind_tools(self, tools: Sequence[Any], **kwargs: Any) -> Runnable[Any, AIMessage]:
        return self


def search_tool(
    documents: Sequence[Document],
    response_format: Literal["content", "content_and_artifact"] = "content_and_artifact",
) -> BaseTool:
    return create_retriever_tool(
        RunnableLambda(lambda _: list(documents)),
        "search",
        "Look passages up.",
        response_format=response_format,
    )


@pytest.fixture
def llm() -> Iterator[ChatCacheBlend]:
    engine = scripted(toy_engine(recompute_ratio=0.0), script)
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


@pytest.mark.parametrize("form", ["content", "content_and_artifact"])
async def test_another_model_calls_the_tools_and_ours_answers_from_what_they_found(
    form: Any,
    llm: ChatCacheBlend,
) -> None:
    agent = create_agent(
        ToolCaller(responses=[AIMessage("", tool_calls=[CALL])]),
        [search_tool(CHUNKS, form)],
        middleware=[CacheBlendMiddleware(llm)],
    )
    answer = ask(agent)[-1]
    assert hits(answer) == [True] * 3
    documents = {c["document_id"] for c in answer.response_metadata["cacheblend"]["chunks"]}
    assert documents == {"report"}
    outcome = await agent.ainvoke({"messages": [HumanMessage("Is the river quiet?")]})
    assert outcome["messages"][-1].text == answer.text


@tool
def search(query: str) -> str:
    """Look something up, without Documents."""
    return "nothing"


def test_other_calls_stay_with_the_agents_own_model(
    llm: ChatCacheBlend, caplog: pytest.LogCaptureFixture
) -> None:
    said = [AIMessage("", tool_calls=[CALL]), AIMessage("asked again")]
    agent = create_agent(
        ToolCaller(responses=said), [search], middleware=[CacheBlendMiddleware(llm)]
    )
    assert [ask(agent)[-1].text for _ in range(2)] == ["asked again"] * 2
    (warning,) = caplog.messages
    assert warning.startswith("tool 'search' returned no Documents and no passage that is known")
    assert "response_format='content_and_artifact', or precompute" in warning

    with pytest.raises(ConfigError, match="llm is a ToolCaller: give a ChatCacheBlend"):
        CacheBlendMiddleware(ToolCaller(responses=said))
