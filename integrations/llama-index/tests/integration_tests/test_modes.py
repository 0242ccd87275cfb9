"""Engines of LlamaIndex's own around a query engine: each reuses what it shows verbatim."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from llama_index.core import VectorStoreIndex
from llama_index.core.query_engine import (
    CitationQueryEngine,
    RouterQueryEngine,
    SubQuestionQueryEngine,
)
from llama_index.core.question_gen import LLMQuestionGenerator
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.core.selectors import LLMSingleSelector
from llama_index.core.settings import Settings
from llama_index.core.tools import QueryEngineTool

from llama_index.llms.cacheblend import (
    CacheBlendLLM,
    CacheBlendPromptHelper,
    cacheblend_query_engine,
    collect_reports,
)
from llama_index.postprocessor.cacheblend import CacheBlendPostprocessor

CHOICE = '[{"choice": 2, "reason": "it asks so"}]'
QUESTIONS = """```json
{"items": [{"sub_question": "What of people?", "tool_name": "people"},
           {"sub_question": "What of companies?", "tool_name": "companies"}]}
```"""


def tools(index: VectorStoreIndex, llm: CacheBlendLLM) -> list[QueryEngineTool]:
    options: dict[str, Any] = {"similarity_top_k": 99, "show_progress": False}
    return [
        QueryEngineTool.from_defaults(
            cacheblend_query_engine(index, llm, **options), name=name, description=f"about {name}"
        )
        for name in ("people", "companies")
    ]


def citation(index: VectorStoreIndex, llm: CacheBlendLLM) -> Any:
    Settings.prompt_helper = CacheBlendPromptHelper.from_llm(llm)
    found = [CacheBlendPostprocessor(llm=llm)]
    return CitationQueryEngine.from_args(
        index, llm=llm, similarity_top_k=99, node_postprocessors=found
    )


def router(index: VectorStoreIndex, llm: CacheBlendLLM) -> Any:
    selector = LLMSingleSelector.from_defaults(llm=llm)
    return RouterQueryEngine(selector, tools(index, llm), llm=llm)


def sub_questions(index: VectorStoreIndex, llm: CacheBlendLLM) -> Any:
    return SubQuestionQueryEngine.from_defaults(
        query_engine_tools=tools(index, llm),
        question_gen=LLMQuestionGenerator.from_defaults(llm=llm),
        response_synthesizer=get_response_synthesizer(llm=llm),
        verbose=False,
    )


@pytest.mark.parametrize("is_chat", [False, True], ids=["completion", "chat"])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize(
    ("make", "said", "answering", "least"),
    [
        (citation, [], 1, 0.85),  # it shows nodes without metadata
        (router, [CHOICE], 1, 0.95),
        (sub_questions, [QUESTIONS], 2, 0.95),
    ],
)
def test_what_an_engine_shows_is_reused(
    make: Any,
    said: list[str],
    answering: int,
    least: float,
    asynchronous: bool,
    is_chat: bool,
    index: VectorStoreIndex,
    acting: Any,
    question: str,
) -> None:
    llm, _ = acting(*said, *[lambda answer: answer] * 9, is_chat_model=is_chat)
    engine = make(index, llm)
    with collect_reports() as reports:
        text = asyncio.run(engine.aquery(question)) if asynchronous else engine.query(question)
    shown = "llm" if said else "none"
    nodes = [node.get_content(shown) for node in index.docstore.docs.values()]
    tokens = sum(len(llm.open().tokenize(text)) for text in nodes)
    retrieved = [report["reused_tokens"] for report in reports if report["chunks"]]
    assert str(text)
    assert sum(retrieved) >= least * tokens * answering
    assert said == [] or len(retrieved) == answering
