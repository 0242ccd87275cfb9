"""Engines built on response modes: each runs, and reuses what it shows verbatim."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from llama_index.core import PromptTemplate, VectorStoreIndex
from llama_index.core.bridge.pydantic import BaseModel
from llama_index.core.query_engine import (
    CitationQueryEngine,
    RetrieverQueryEngine,
    RouterQueryEngine,
    SubQuestionQueryEngine,
)
from llama_index.core.question_gen import LLMQuestionGenerator
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.core.schema import BaseNode
from llama_index.core.selectors import LLMSingleSelector
from llama_index.core.settings import Settings
from llama_index.core.tools import QueryEngineTool

from cacheblend_rag.kv.chunk_kv import chunk_id
from llama_index.llms.cacheblend import (
    CacheBlendLLM,
    CacheBlendPromptHelper,
    collect_reports,
)
from llama_index.postprocessor.cacheblend import CacheBlendPostprocessor

LEAST = 0.95


@pytest.fixture(params=["completion", "chat"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["sync", "async"])
def asynchronous(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "async")


@pytest.fixture
def nodes(index: VectorStoreIndex) -> list[BaseNode]:
    return list(index.docstore.docs.values())


def share_reused(reports: list[dict[str, Any]], nodes: list[BaseNode], llm: CacheBlendLLM) -> float:
    """Return which part of the retrieved chunks' tokens was reused in some prompt."""
    reused = {chunk["chunk_id"] for report in reports for chunk in report["chunks"] if chunk["hit"]}
    encoded = [llm.open().tokenize(node.get_content("llm").strip()) for node in nodes]
    found = sum(len(token_ids) for token_ids in encoded if chunk_id(token_ids) in reused)
    return found / sum(map(len, encoded))


def ask(engine: Any, question: str) -> str:
    response = engine.query(question)
    return "".join(response.response_gen) if hasattr(response, "response_gen") else str(response)


async def ask_async(engine: Any, question: str) -> str:
    response = await engine.aquery(question)
    if hasattr(response, "async_response_gen"):
        return "".join([piece async for piece in response.async_response_gen()])
    return str(response)


def test_citation_query_engine(
    kind: str,
    asynchronous: bool,
    index: VectorStoreIndex,
    nodes: list[BaseNode],
    llm: CacheBlendLLM,
    question: str,
) -> None:
    llm.is_chat_model = kind == "chat"
    Settings.prompt_helper = CacheBlendPromptHelper.from_llm(llm)
    engine = CitationQueryEngine.from_args(
        index,
        llm=llm,
        similarity_top_k=len(nodes),
        node_postprocessors=[CacheBlendPostprocessor(llm=llm)],
    )
    with collect_reports() as reports:
        text = asyncio.run(ask_async(engine, question)) if asynchronous else ask(engine, question)

    shown = sum(len(llm.open().tokenize(node.get_content())) for node in nodes)
    assert text
    assert sum(report["reused_tokens"] for report in reports) >= 0.85 * shown


def query_engine(index: VectorStoreIndex, llm: CacheBlendLLM, count: int) -> RetrieverQueryEngine:
    return RetrieverQueryEngine(
        index.as_retriever(similarity_top_k=count),
        get_response_synthesizer(llm=llm, prompt_helper=CacheBlendPromptHelper.from_llm(llm)),
        node_postprocessors=[CacheBlendPostprocessor(llm=llm)],
    )


def tools(index: VectorStoreIndex, llm: CacheBlendLLM, count: int) -> list[QueryEngineTool]:
    return [
        QueryEngineTool.from_defaults(
            query_engine(index, llm, count), name=name, description=f"answers about {name}"
        )
        for name in ("people", "companies")
    ]


def test_router_query_engine(
    kind: str,
    asynchronous: bool,
    index: VectorStoreIndex,
    nodes: list[BaseNode],
    scripted: Any,
    question: str,
) -> None:
    llm = scripted(
        {"Some choices are given below": '[{"choice": 2, "reason": "it asks so"}]'},
        is_chat_model=kind == "chat",
    )
    router = RouterQueryEngine(
        selector=LLMSingleSelector.from_defaults(llm=llm),
        query_engine_tools=tools(index, llm, len(nodes)),
        llm=llm,
    )
    with collect_reports() as reports:
        text = asyncio.run(ask_async(router, question)) if asynchronous else ask(router, question)

    share = share_reused(reports, nodes, llm)
    assert text
    assert share >= LEAST


def test_sub_question_query_engine(
    kind: str,
    asynchronous: bool,
    index: VectorStoreIndex,
    nodes: list[BaseNode],
    scripted: Any,
    question: str,
) -> None:
    asked = '{{"items": [{}]}}'.format(
        ", ".join(
            f'{{"sub_question": "What of {name}?", "tool_name": "{name}"}}'
            for name in ("people", "companies")
        )
    )
    llm = scripted({"# Example 1": f"```json\n{asked}\n```"}, is_chat_model=kind == "chat")
    engine = SubQuestionQueryEngine.from_defaults(
        query_engine_tools=tools(index, llm, len(nodes)),
        question_gen=LLMQuestionGenerator.from_defaults(llm=llm),
        response_synthesizer=get_response_synthesizer(llm=llm),
        verbose=False,
    )
    with collect_reports() as reports:
        text = asyncio.run(ask_async(engine, question)) if asynchronous else ask(engine, question)

    answering = [report for report in reports if report["chunks"]]
    share = min(share_reused([report], nodes, llm) for report in answering)
    assert text
    assert len(answering) == 2
    assert share >= LEAST


class Fact(BaseModel):
    """A name and what is said of it."""

    name: str
    fact: str


def test_structured_predict(
    kind: str,
    asynchronous: bool,
    nodes: list[BaseNode],
    scripted: Any,
) -> None:
    llm = scripted(
        {"Find a fact": '{"name": "Berta", "fact": "lives in Paris"}'}, is_chat_model=kind == "chat"
    )
    prompt = PromptTemplate("Notes:\n{notes}\nFind a fact in the notes.")
    notes = "\n\n".join(node.get_content("llm") for node in nodes)
    with collect_reports() as reports:
        if asynchronous:
            fact = asyncio.run(llm.astructured_predict(Fact, prompt, notes=notes))
        else:
            fact = llm.structured_predict(Fact, prompt, notes=notes)

    share = share_reused(reports, nodes, llm)
    assert fact == Fact(name="Berta", fact="lives in Paris")
    assert share >= LEAST
