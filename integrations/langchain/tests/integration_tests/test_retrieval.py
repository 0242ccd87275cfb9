"""From source documents to answers: splitters, stores, chains, updates."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pytest
from cacheblend_rag import TransformersEngine
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_core.runnables import RunnableLambda
from langchain_text_splitters import (
    CharacterTextSplitter,
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
from langchain_cacheblend.instruction import prompt_instruction
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


def split(name: str) -> list[Document]:
    recursive = RecursiveCharacterTextSplitter
    if name == "recursive":
        return recursive(chunk_size=500, chunk_overlap=0).split_documents(SOURCES)
    if name == "recursive, overlap":
        splitter = recursive(chunk_size=500, chunk_overlap=120, add_start_index=True)
        return splitter.split_documents(SOURCES)
    if name == "recursive, by tokens":
        splitter = recursive.from_huggingface_tokenizer(
            make_tokenizer(), chunk_size=90, chunk_overlap=20
        )
        return splitter.split_documents(SOURCES)
    if name == "character":
        return CharacterTextSplitter(chunk_size=600, chunk_overlap=0).split_documents(SOURCES)
    if name == "markdown":
        return markdown()
    return recursive(chunk_size=300, chunk_overlap=40).split_documents(markdown())


def reused_share(llm: ChatCacheBlend, outcome: dict[str, Any]) -> float:
    """Reused tokens as a share of the retrieved passages' tokens."""
    retrieved = sum(llm.get_num_tokens(d.page_content) for d in outcome["context"])
    return float(outcome["report"]["reused_tokens"]) / retrieved


@pytest.mark.parametrize(
    "name",
    [
        "recursive",
        "recursive, overlap",
        "recursive, by tokens",
        "character",
        "markdown",
        "markdown, recursive",
    ],
)
def test_what_the_usual_splitters_make_is_reused(name: str) -> None:
    llm, chunks = open_llm(max_tokens=1), split(name)
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


@pytest.fixture
def ordered() -> tuple[TransformersEngine, list[Document]]:
    engine = random_engine()
    chunks = [
        Document(page_content=f"Part {i} of {name}. {text}", metadata={"source": name})
        for name, text in (("a", "The river is quiet. " * 6), ("b", "The tower is old. " * 6))
        for i in range(3)
    ]
    CacheBlendTransformer(engine=engine).transform_documents(chunks)
    return engine, chunks


def texts(documents: Sequence[Document]) -> list[str]:
    return [document.page_content[:11] for document in documents]


def test_text_that_changed_after_indexing_is_computed_and_named(
    ordered: tuple[TransformersEngine, list[Document]],
) -> None:
    engine, (a0, a1, *_) = ordered
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


def test_a_document_without_text_passes_through(caplog: pytest.LogCaptureFixture) -> None:
    engine = random_engine()
    documents = [
        Document(page_content="", metadata={"source": "a"}),
        Document(page_content="The river is quiet.", metadata={"source": "a"}),
        Document(page_content="  \n"),
    ]
    transformer = CacheBlendTransformer(engine=engine)
    assert transformer.transform_documents(documents) == documents
    assert len(engine.registry) == 1
    llm = ChatCacheBlend(engine=engine, max_tokens=1)
    chain = create_cacheblend_chain(RunnableLambda(lambda _: documents), llm)
    assert [c["hit"] for c in chain.invoke("Who?")["report"]["chunks"]] == [True]
