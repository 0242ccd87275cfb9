"""Answers of ChatCacheBlend against the plain engine's, in every way LangChain asks for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from cacheblend_rag import Document, SamplingParams, TransformersEngine
from langchain_core.caches import InMemoryCache
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage

from langchain_cacheblend import ChatCacheBlend
from tests.models import random_engine

DOCUMENTS = [
    Document(f"doc-{i}", tuple(f"Note {i}.{j}: " + text for j in range(3)))
    for i, text in enumerate(
        [
            "the quiet river stands near the old bridge and the small garden. " * 3,
            "many people visit the large museum each summer and the tower too. " * 3,
            "a path leads from the harbour to the distant castle on the road. " * 3,
        ]
    )
]


def prompt_over(*documents: Document, question: str = "Where is the museum?") -> str:
    passages = "\n\n".join(text for document in documents for text in document.chunks)
    return f"{passages}\n\nQuestion: {question}"


@pytest.fixture
def engine() -> Iterator[TransformersEngine]:
    found = random_engine()
    found.precompute(DOCUMENTS, progress=False)
    yield found
    found.close()


def test_a_model_without_a_chat_template_reads_plain_text() -> None:
    engine = random_engine(chat_template=False)
    engine.precompute(DOCUMENTS, progress=False)
    llm = ChatCacheBlend(engine=engine, max_tokens=8)
    text = prompt_over(*DOCUMENTS)
    answer = llm.invoke([SystemMessage("Answer."), HumanMessage(text)], recompute_ratio=1.0)
    plain = engine.generate_full(f"Answer.\n\n{text}", SamplingParams(max_tokens=8))
    assert answer.text == plain.text
    assert sum(chunk["hit"] for chunk in answer.response_metadata["cacheblend"]["chunks"]) == 9


def report_of(message: AIMessage) -> dict[str, Any]:
    return dict(message.response_metadata["cacheblend"])


@pytest.mark.parametrize("options", [{}, {"streaming": True}])
async def test_an_answer_from_the_llm_cache_tells_no_other_calls_report(
    options: dict[str, Any], engine: TransformersEngine
) -> None:
    llm = ChatCacheBlend(engine=engine, max_tokens=2, cache=InMemoryCache(), **options)
    text = prompt_over(DOCUMENTS[0])
    kept = llm.generate([[HumanMessage(text)]])
    first = kept.generations[0][0].message
    asked = [llm.invoke(text), *llm.batch([text]), await llm.ainvoke(text)]
    assert [report_of(message) for message in asked] == [{"cached": True}] * 3
    assert {message.text for message in asked} == {first.text}
    assert asked[0].response_metadata["finish_reason"] == "length"
    assert report_of(first)["seconds"]
    assert kept.generations[0][0].message is first
    assert report_of(llm.invoke(text, max_tokens=1))["seconds"]
