"""An agent looks passages up with a tool and answers from their stored KV.

ChatCacheBlend calls no tools, so the step that does is scripted; the answers are the engine's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from cacheblend_rag import TransformersEngine
from cacheblend_rag.errors import ConfigError
from langchain.agents import create_agent
from langchain_core.callbacks import CallbackManagerForLLMRun
from langchain_core.documents import Document
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.runnables import Runnable
from langchain_core.tools import tool

from langchain_cacheblend import CacheBlendTransformer, ChatCacheBlend
from langchain_cacheblend.middleware import CacheBlendMiddleware
from tests.models import random_engine
from tests.search_tool import search_tool

CHUNKS = [
    Document(page_content=f"Part {i} says {{this}}: " + text * 8, metadata={"source": "report"})
    for i, text in enumerate(["the river is quiet. ", "the tower is old. ", "she left Rome. "])
]
CALL = {"name": "search", "args": {"query": "river"}, "id": "1", "type": "tool_call"}


class ToolCaller(BaseChatModel):
    """Calls the search tool when a person asked, else says that it was asked again."""

    @property
    def _llm_type(self) -> str:
        return "scripted"

    def bind_tools(self, tools: Sequence[Any], **kwargs: Any) -> Runnable[Any, AIMessage]:
        return self

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        asked = isinstance(messages[-1], HumanMessage)
        message = AIMessage("", tool_calls=[CALL]) if asked else AIMessage("asked again")
        return ChatResult(generations=[ChatGeneration(message=message)])


@pytest.fixture
def engine() -> Iterator[TransformersEngine]:
    found = random_engine(recompute_ratio=0.0)
    CacheBlendTransformer(engine=found).transform_documents(CHUNKS)
    yield found
    found.close()


def ask(agent: Any, text: str = "Is the river quiet?") -> list[BaseMessage]:
    return list(agent.invoke({"messages": [HumanMessage(text)]})["messages"])


def hits(message: BaseMessage) -> list[bool]:
    return [chunk["hit"] for chunk in message.response_metadata["cacheblend"]["chunks"]]


def test_the_answer_comes_from_the_stored_kv_of_what_the_tool_found(
    engine: TransformersEngine,
) -> None:
    llm = ChatCacheBlend(engine=engine, max_tokens=6)
    agent = create_agent(
        ToolCaller(),
        tools=[search_tool(CHUNKS)],
        system_prompt="Answer from what you find.",
        middleware=[CacheBlendMiddleware(llm)],
    )
    messages = ask(agent)
    assert [type(m) for m in messages] == [HumanMessage, AIMessage, ToolMessage, AIMessage]
    assert hits(messages[-1]) == [True] * 3
    report = messages[-1].response_metadata["cacheblend"]
    passages = sum(llm.get_num_tokens(chunk.page_content) for chunk in CHUNKS)
    assert report["reused_tokens"] == passages
    assert {chunk["document_id"] for chunk in report["chunks"]} == {"report"}


async def test_known_passages_are_found_in_what_a_tool_returns_by_default(
    engine: TransformersEngine,
) -> None:
    llm = ChatCacheBlend(engine=engine, max_tokens=6)
    agent = create_agent(
        ToolCaller(), [search_tool(CHUNKS, "content")], middleware=[CacheBlendMiddleware(llm)]
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
    engine: TransformersEngine, caplog: pytest.LogCaptureFixture
) -> None:
    llm = ChatCacheBlend(engine=engine, max_tokens=2)
    agent = create_agent(ToolCaller(), [search], middleware=[CacheBlendMiddleware(llm)])
    assert [ask(agent)[-1].text for _ in range(2)] == ["asked again"] * 2
    (warning,) = caplog.messages
    assert warning.startswith("tool 'search' returned no Documents and no passage that is known")
    assert "response_format='content_and_artifact', or precompute" in warning


def test_the_middleware_wants_a_model_of_ours() -> None:
    with pytest.raises(ConfigError, match="llm is a ToolCaller: give a ChatCacheBlend"):
        CacheBlendMiddleware(ToolCaller())
