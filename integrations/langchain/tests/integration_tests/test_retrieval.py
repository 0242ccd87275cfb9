"""From source documents to answers: splitters, stores, chains, updates."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_core.runnables import RunnableLambda
from langchain_text_splitters import RecursiveCharacterTextSplitter
from toy import TOY, generate_collection

from langchain_cacheblend import (
    DEFAULT_PROMPT,
    CacheBlendTransformer,
    ChatCacheBlend,
    create_cacheblend_chain,
)
from langchain_cacheblend.options import prompt_instruction
from tests.models import make_tokenizer, toy_engine

EMBEDDING = DeterministicFakeEmbedding(size=16)
SOURCES = [
    Document(page_content="\n\n".join(d.chunks), metadata={"source": f"{d.document_id}.txt"})
    for d in generate_collection(documents=6, questions=1, seed=5)[0]
]
QUESTIONS = ("Where does she live?", "What is the main product?", "Who plays the piano?")


def open_llm(**options: Any) -> ChatCacheBlend:
    """A model on a new engine, whose passages stand behind the default prompt's instruction."""
    engine = toy_engine(
        instruction=prompt_instruction(DEFAULT_PROMPT, make_tokenizer()), recompute_ratio=0.0
    )
    return ChatCacheBlend(engine=engine, **{"max_tokens": 4, **options})


def reused_share(llm: ChatCacheBlend, outcome: dict[str, Any]) -> float:
    """Reused tokens as a share of the retrieved passages' tokens."""
    retrieved = sum(llm.get_num_tokens(d.page_content) for d in outcome["context"])
    return float(outcome["report"]["reused_tokens"]) / retrieved


@pytest.mark.parametrize("by_tokens", [False, True])
def test_what_splitters_make_is_reused(by_tokens: bool) -> None:
    splitter = RecursiveCharacterTextSplitter(chunk_size=500, chunk_overlap=120)
    if by_tokens:
        splitter = RecursiveCharacterTextSplitter.from_huggingface_tokenizer(
            make_tokenizer(), chunk_size=90, chunk_overlap=20
        )
    llm, chunks = open_llm(max_tokens=1), splitter.split_documents(SOURCES)
    chain = create_cacheblend_chain(chunks, llm, embedding=EMBEDDING, k=5)
    outcomes = chain.batch(list(QUESTIONS), config={"max_concurrency": 1})
    assert all(len(outcome["context"]) == 5 for outcome in outcomes)
    assert min(reused_share(llm, outcome) for outcome in outcomes) >= 0.95
    behind = [llm.engine.registry.variants(chunk.page_content) for chunk in chunks]
    assert sum(bool(variants[0].context) for variants in behind) > len(chunks) / 2


def test_the_chain_tells_the_model_its_instruction_or_warns_of_another_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    llm = ChatCacheBlend(model=TOY, max_tokens=1)
    prompt = ChatPromptTemplate.from_template("Read this:\n{context}\nAnd answer: {input}")
    create_cacheblend_chain(SOURCES[:1], llm, prompt=prompt, embedding=EMBEDDING)
    assert llm.engine.instruction == "<bos>Read this:\n"
    with caplog.at_level(logging.WARNING):
        create_cacheblend_chain(SOURCES[:1], open_llm(), embedding=EMBEDDING)
        assert "another instruction" not in caplog.text
        create_cacheblend_chain(SOURCES[:1], open_llm(), prompt=prompt, embedding=EMBEDDING)
    assert "another instruction" in caplog.text


def test_text_that_changed_after_indexing_is_computed_and_named() -> None:
    engine = toy_engine()
    a0, a1 = (
        Document(f"Part {i} of it. " + "The river is quiet. " * 6, metadata={"source": "a"})
        for i in range(2)
    )
    CacheBlendTransformer(engine=engine).transform_documents([a0, a1])
    changed = a1.model_copy(update={"page_content": a1.page_content.replace("quiet", "loud")})
    llm = ChatCacheBlend(engine=engine, max_tokens=1)
    chain = create_cacheblend_chain(RunnableLambda(lambda _: [a0, changed]), llm)
    report = chain.invoke("Who?")["report"]
    assert [(chunk["hit"], chunk["reason"]) for chunk in report["chunks"]] == [
        (True, None),
        (False, "unknown"),
    ]
    shouting = create_cacheblend_chain(
        RunnableLambda(lambda _: [a0, a1]),
        llm,
        document_prompt=PromptTemplate.from_template(
            "{{ page_content | upper }}", template_format="jinja2"
        ),
    )
    report = shouting.invoke("Who?")["report"]
    assert [chunk["reason"] for chunk in report["chunks"]] == ["altered text", "altered text"]
