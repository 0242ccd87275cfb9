"""Agents on a scripted engine: tools are called, and the passages that they find are reused."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from llama_index.core import Document, MockEmbedding, Settings, VectorStoreIndex
from llama_index.core.agent.workflow import (
    AgentStream,
    FunctionAgent,
    ReActAgent,
    ToolCallResult,
)
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import BaseNode

from cacheblend_rag import ChatPrompt
from llama_index.llms.cacheblend import (
    cacheblend_retriever_tool,
    collect_reports,
)

QUESTION = "Who plays the cello?"
SEARCH = [("search", {"input": QUESTION})]
ANSWER = "Clara Berg does."


def run(agent: Any, asked: str = QUESTION) -> tuple[Any, list[dict[str, Any]], list[Any]]:
    """Return what an agent answers, the reports of the model's calls, and the events."""

    async def work() -> tuple[Any, list[Any]]:
        handler = agent.run(asked)
        events = [event async for event in handler.stream_events()]
        return await handler, events

    with collect_reports() as reports:
        answer, events = asyncio.run(work())
    return answer, reports, events


@pytest.fixture
def passages(index: VectorStoreIndex) -> list[BaseNode]:
    return list(index.docstore.docs.values())[:2]


@pytest.mark.parametrize("streaming", [False, True])
def test_a_function_agent_reuses_the_passages_that_it_found(
    streaming: bool, index: VectorStoreIndex, acting: Any
) -> None:
    llm, script = acting(SEARCH, ANSWER)
    tool = cacheblend_retriever_tool(index, llm, similarity_top_k=2, show_progress=False)
    agent = FunctionAgent(llm=llm, tools=[tool], system_prompt="Search first.", streaming=streaming)
    answer, reports, events = run(agent)

    assert str(answer) == ANSWER
    first, second = reports
    assert first["chunks"] == []
    assert [chunk["hit"] for chunk in second["chunks"]] == [True, True]
    assert second["reused_tokens"] > 64
    (result,) = (event for event in events if isinstance(event, ToolCallResult))
    found = [node.node.get_content("llm") for node in result.tool_output.raw_output]
    told = script.asked[1].prompt.messages
    assert [message["role"] for message in told] == ["system", "user", "assistant", "tool"]
    assert all(text in told[3]["content"] for text in found)
    assert told[3]["tool_call_id"] == told[2]["tool_calls"][0]["id"]
    streamed = "".join(event.delta for event in events if isinstance(event, AgentStream))
    assert streamed == (ANSWER if streaming else "")


def test_a_react_agent_reuses_the_passages_that_it_observed(
    index: VectorStoreIndex, acting: Any
) -> None:
    act = f'Thought: I need to search.\nAction: search\nAction Input: {{"input": "{QUESTION}"}}'
    llm, script = acting(act, f"Thought: I know it now.\nAnswer: {ANSWER}")
    agent = ReActAgent(
        llm=llm,
        tools=[cacheblend_retriever_tool(index, llm, similarity_top_k=2, show_progress=False)],
    )
    answer, (first, second), _ = run(agent)
    assert str(answer) == ANSWER
    assert first["chunks"] == []
    assert [chunk["hit"] for chunk in second["chunks"]] == [True, True]
    assert not isinstance(script.asked[0].prompt, ChatPrompt)


def test_a_retriever_tool_of_documents(acting: Any, passages: list[BaseNode]) -> None:
    """It searches for what it was asked, whatever the argument's name is."""

    class Recording(MockEmbedding):
        def _get_query_embedding(self, query: str) -> list[float]:
            asked.append(query)
            return super()._get_query_embedding(query)

        async def _aget_query_embedding(self, query: str) -> list[float]:
            return self._get_query_embedding(query)

    asked: list[str] = []
    llm, _ = acting()
    Settings.llm = llm
    tool = cacheblend_retriever_tool(
        [Document(text=node.get_content(), id_=f"tool-{n}") for n, node in enumerate(passages)],
        name="notes",
        description="Notes on people.",
        transformations=[SentenceSplitter(chunk_size=256, chunk_overlap=0)],
        embed_model=Recording(8),
        show_progress=False,
    )
    assert (tool.metadata.name, tool.metadata.description) == ("notes", "Notes on people.")
    said = [tool.call(QUESTION), tool.call(input=QUESTION), asyncio.run(tool.acall(input=QUESTION))]
    assert {text.strip() for text in asked} == {QUESTION}
    for output in said:
        assert all(node.get_content() in output.content for node in passages)
    assert llm.open().registry.document("tool-0")
