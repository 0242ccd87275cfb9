"""From source documents to answers: splitters, stores, chains, updates."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_core.runnables import RunnableLambda
from langchain_text_splitters import (
    MarkdownHeaderTextSplitter,
    RecursiveCharacterTextSplitter,
)
from toy import generate_collection

from langchain_cacheblend import (
    DEFAULT_PROMPT,
    CacheBlendTransformer,
    ChatCacheBlend,
    create_cacheblend_chain,
)
from langchain_cacheblend.options import prompt_instruction
from tests.models import make_tokenizer, random_engine, random_model

EMBEDDING = DeterministicFakeEmbedding(size=16)
SOURCES = [
    Document(page_content="\n\n".join(d.chunks), metadata={"source": f"{d.document_id}.txt"})
    for d in generate_collection(documents=6, questions=1, seed=5)[0]
]
QUESTIONS = ("Where does she live?", "What is the main product?", "Who plays the piano?")


def open_llm(**options: Any) -> ChatCacheBlend:
    """A model on a new engine, whose passages stand behind the default prompt's instruction."""
    engine = random_engine(
        instruction=prompt_instruction(DEFAULT_PROMPT, make_tokenizer()), recompute_ratio=0.0
    )
    return ChatCacheBlend(engine=engine, **{"max_tokens": 4, **options})


def markdown() -> list[Document]:
    pages = []
    for number, source in enumerate(SOURCES):
        parts = source.page_content.split("\n\n")
        text = "\n\n".join(f"## Part {i}\n\n{part}" for i, part in enumerate(parts))
        splitter = MarkdownHeaderTextSplitter([("##", "part")], strip_headers=bool(number % 2))
        for page in splitter.split_text(text):
            page.metadata.update(source.metadata)
            pages.append(page)
    return pages


def splits() -> dict[str, list[Document]]:
    recursive = RecursiveCharacterTextSplitter
    overlapping = recursive(chunk_size=500, chunk_overlap=120, add_start_index=True)
    by_tokens = recursive.from_huggingface_tokenizer(
        make_tokenizer(), chunk_size=90, chunk_overlap=20
    )
    return {
        "overlap": overlapping.split_documents(SOURCES),
        "by tokens": by_tokens.split_documents(SOURCES),
        "markdown": recursive(chunk_size=300, chunk_overlap=40).split_documents(markdown()),
    }


def reused_share(llm: ChatCacheBlend, outcome: dict[str, Any]) -> float:
    """Reused tokens as a share of the retrieved passages' tokens."""
    retrieved = sum(llm.get_num_tokens(d.page_content) for d in outcome["context"])
    return float(outcome["report"]["reused_tokens"]) / retrieved


@pytest.mark.parametrize("name", ["overlap", "by tokens", "markdown"])
def test_what_the_usual_splitters_make_is_reused(name: str) -> None:
    llm, chunks = open_llm(max_tokens=1), splits()[name]
    chain = create_cacheblend_chain(chunks, llm, embedding=EMBEDDING, k=5)
    outcomes = chain.batch(list(QUESTIONS), config={"max_concurrency": 1})
    assert all(len(outcome["context"]) == 5 for outcome in outcomes)
    assert min(reused_share(llm, outcome) for outcome in outcomes) >= 0.95
    behind = [llm.engine.registry.variants(chunk.page_content) for chunk in chunks]
    assert sum(bool(variants[0].context) for variants in behind) > len(chunks) / 2


def test_the_chain_tells_the_model_its_instruction() -> None:
    tokenizer = make_tokenizer()
    llm = ChatCacheBlend(model=random_model(), tokenizer=tokenizer, max_tokens=1)
    prompt = ChatPromptTemplate.from_template("Read this:\n{context}\nAnd answer: {input}")
    create_cacheblend_chain(SOURCES[:1], llm, prompt=prompt, embedding=EMBEDDING)
    assert llm.engine.instruction == "<bos>Read this:\n"


def test_the_chain_warns_when_passages_stand_behind_another_instruction(
    caplog: pytest.LogCaptureFixture,
) -> None:
    prompt = ChatPromptTemplate.from_template("Read this:\n{context}\nAnd answer: {input}")
    with caplog.at_level(logging.WARNING):
        create_cacheblend_chain(SOURCES[:1], open_llm(), embedding=EMBEDDING)
        assert "another instruction" not in caplog.text
        create_cacheblend_chain(SOURCES[:1], open_llm(), prompt=prompt, embedding=EMBEDDING)
    assert "another instruction" in caplog.text


def test_text_that_changed_after_indexing_is_computed_and_named() -> None:
    engine = random_engine()
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
