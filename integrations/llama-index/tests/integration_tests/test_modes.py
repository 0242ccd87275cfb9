"""Every response mode and the engines built on them: each runs, and reuses what it shows verbatim.

``--modes-table`` prints what docs/llama-index.md shows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from llama_index.core import PromptTemplate, VectorStoreIndex
from llama_index.core.bridge.pydantic import BaseModel
from llama_index.core.chat_engine import ContextChatEngine
from llama_index.core.query_engine import (
    CitationQueryEngine,
    RetrieverQueryEngine,
    RouterQueryEngine,
    SubQuestionQueryEngine,
)
from llama_index.core.question_gen import LLMQuestionGenerator
from llama_index.core.response_synthesizers import ResponseMode, get_response_synthesizer
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
WITHOUT_CHUNKS = {
    ResponseMode.GENERATION: "asks the model without any chunk",
    ResponseMode.NO_TEXT: "calls no model",
    ResponseMode.CONTEXT_ONLY: "calls no model",
}
WITHOUT_STREAMS = {ResponseMode.ACCUMULATE, ResponseMode.COMPACT_ACCUMULATE}
Row = tuple[str, str, str, str]


@pytest.fixture(scope="module")
def table(request: pytest.FixtureRequest) -> Iterator[dict[str, dict[str, str]]]:
    """Collects one line for each mode; printed when asked for."""
    lines: dict[str, dict[str, str]] = {}
    yield lines
    if request.config.getoption("--modes-table"):
        print("\n\n| mode | completion | chat | why not |\n| --- | --- | --- | --- |")
        for mode, cells in lines.items():
            shares = [cells.get(kind, "") for kind in ("completion", "chat")]
            print(f"| {mode} | {shares[0]} | {shares[1]} | {cells.get('why', '')} |")


@pytest.fixture(params=["completion", "chat"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["sync", "async"])
def asynchronous(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "async")


@pytest.fixture
def nodes(index: VectorStoreIndex) -> list[BaseNode]:
    return list(index.docstore.docs.values())


def share_reused(
    reports: list[dict[str, Any]], nodes: list[BaseNode], llm: CacheBlendLLM, text: str = "llm"
) -> float:
    """Return which part of the retrieved chunks' tokens was reused in some prompt."""
    reused = {chunk["chunk_id"] for report in reports for chunk in report["chunks"] if chunk["hit"]}
    encoded = [llm.open().tokenize(node.get_content(text).strip()) for node in nodes]
    found = sum(len(token_ids) for token_ids in encoded if chunk_id(token_ids) in reused)
    return found / sum(map(len, encoded))


def note(table: dict[str, dict[str, str]], mode: str, **cells: str) -> None:
    """Keep the lowest share of a mode's variants."""
    line = table.setdefault(mode, {})
    for name, cell in cells.items():
        line[name] = min(line.get(name, cell), cell, key=lambda text: float(text.rstrip(" %") or 0))


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "streaming"])
@pytest.mark.parametrize("mode", ResponseMode, ids=lambda mode: mode.value)
def test_response_modes(
    mode: ResponseMode,
    kind: str,
    asynchronous: bool,
    streaming: bool,
    index: VectorStoreIndex,
    nodes: list[BaseNode],
    llm: CacheBlendLLM,
    question: str,
    table: dict[str, dict[str, str]],
) -> None:
    if streaming and mode in WITHOUT_STREAMS:
        pytest.skip("LlamaIndex has no streams in this mode")
    llm.is_chat_model = kind == "chat"
    engine = RetrieverQueryEngine(
        index.as_retriever(similarity_top_k=len(nodes)),
        get_response_synthesizer(
            llm=llm,
            prompt_helper=CacheBlendPromptHelper.from_llm(llm),
            response_mode=mode,
            streaming=streaming,
        ),
        node_postprocessors=[CacheBlendPostprocessor(llm=llm)],
    )

    with collect_reports() as reports:
        text = asyncio.run(ask_async(engine, question)) if asynchronous else ask(engine, question)

    if mode in WITHOUT_CHUNKS:
        assert not any(report["chunks"] for report in reports)
        table.setdefault(f"`{mode.value}`", {})["why"] = WITHOUT_CHUNKS[mode]
        return
    share = share_reused(reports, nodes, llm)
    note(table, f"`{mode.value}`", **{kind: percent(share)})
    assert text
    assert share >= LEAST


def ask(engine: Any, question: str) -> str:
    response = engine.query(question)
    return "".join(response.response_gen) if hasattr(response, "response_gen") else str(response)


async def ask_async(engine: Any, question: str) -> str:
    response = await engine.aquery(question)
    if hasattr(response, "async_response_gen"):
        return "".join([piece async for piece in response.async_response_gen()])
    return str(response)


@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "streaming"])
def test_context_chat_engine(
    kind: str,
    asynchronous: bool,
    streaming: bool,
    index: VectorStoreIndex,
    nodes: list[BaseNode],
    llm: CacheBlendLLM,
    question: str,
    table: dict[str, dict[str, str]],
) -> None:
    llm.is_chat_model = kind == "chat"
    Settings.prompt_helper = CacheBlendPromptHelper.from_llm(llm)
    chat = ContextChatEngine.from_defaults(
        retriever=index.as_retriever(similarity_top_k=len(nodes)),
        llm=llm,
        node_postprocessors=[CacheBlendPostprocessor(llm=llm)],
        system_prompt="Answer from the notes.",
    )

    async def talk() -> str:
        if not streaming:
            return str(await chat.achat(question))
        return "".join([t async for t in (await chat.astream_chat(question)).async_response_gen()])

    with collect_reports() as reports:
        if asynchronous:
            text = asyncio.run(talk())
        elif streaming:
            text = "".join(chat.stream_chat(question).response_gen)
        else:
            text = str(chat.chat(question))

    share = share_reused(reports, nodes, llm)
    note(table, "`ContextChatEngine`", **{kind: percent(share)})
    assert text
    assert share >= LEAST


def test_citation_query_engine(
    kind: str,
    asynchronous: bool,
    index: VectorStoreIndex,
    nodes: list[BaseNode],
    llm: CacheBlendLLM,
    question: str,
    table: dict[str, dict[str, str]],
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

    share = share_reused(reports, nodes, llm, text="none")
    note(table, "`CitationQueryEngine`", **{kind: percent(share)})
    assert text
    assert share >= LEAST


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
    table: dict[str, dict[str, str]],
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
    note(table, "`RouterQueryEngine`", **{kind: percent(share)})
    assert text
    assert share >= LEAST


def test_sub_question_query_engine(
    kind: str,
    asynchronous: bool,
    index: VectorStoreIndex,
    nodes: list[BaseNode],
    scripted: Any,
    question: str,
    table: dict[str, dict[str, str]],
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
    note(table, "`SubQuestionQueryEngine`", **{kind: percent(share)})
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
    table: dict[str, dict[str, str]],
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
    note(table, "`structured_predict`", **{kind: percent(share)})
    assert fact == Fact(name="Berta", fact="lives in Paris")
    assert share >= LEAST
