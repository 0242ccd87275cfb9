from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from llama_index.core import Document, MockEmbedding, StorageContext, VectorStoreIndex
from llama_index.core.ingestion import DocstoreStrategy, IngestionPipeline
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import BaseNode
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.vector_stores import SimpleVectorStore
from llama_index.vector_stores.faiss import FaissMapVectorStore

from cacheblend_rag import Engine
from llama_index.llms.cacheblend import CacheBlendLLM, CacheBlendPrecompute, CacheBlendVectorStore

EMBEDDING = MockEmbedding(4)


@pytest.fixture
def llm(random_model: Path, tmp_path: Path) -> CacheBlendLLM:
    return CacheBlendLLM(
        model=random_model,
        kv_path=tmp_path / "kv",
        instruction="",
        blend_config={"min_tokens": 0},
        max_tokens=1,
    )


@pytest.fixture(params=["simple", "faiss"])
def store(request: pytest.FixtureRequest, llm: CacheBlendLLM) -> CacheBlendVectorStore:
    if request.param == "simple":
        return CacheBlendVectorStore(SimpleVectorStore(), llm)
    import faiss

    return CacheBlendVectorStore(FaissMapVectorStore(faiss.IndexIDMap2(faiss.IndexFlatL2(4))), llm)


def document(name: str, word: str) -> Document:
    return Document(text=" ".join(f"{word} number {n} is heavy." for n in range(8)), id_=name)


def documents() -> list[Document]:
    return [document("one", "Stone"), document("two", "Brick"), document("three", "Board")]


def steps(llm: CacheBlendLLM) -> list[Any]:
    return [
        SentenceSplitter(chunk_size=40, chunk_overlap=0),
        CacheBlendPrecompute.from_llm(llm, show_progress=False),
    ]


def build(store: CacheBlendVectorStore, llm: CacheBlendLLM) -> VectorStoreIndex:
    return VectorStoreIndex.from_documents(
        documents(),
        storage_context=StorageContext.from_defaults(vector_store=store),
        transformations=steps(llm),
        embed_model=EMBEDDING,
    )


def known(engine: Engine) -> set[str]:
    return {name for name in ("one", "two", "three") if engine.registry.document(name)}


def prompt_hits(llm: CacheBlendLLM, name: str) -> list[str]:
    word = {"one": "Stone", "two": "Brick", "three": "Board"}[name]
    (text,) = [node.get_content() for node in nodes_of(document(name, word))][:1]
    report = llm.complete(text, formatted=True).additional_kwargs["cacheblend"]
    return [text for chunk in report["chunks"] if chunk["hit"]]


def nodes_of(made: Document) -> list[BaseNode]:
    return SentenceSplitter(chunk_size=40, chunk_overlap=0).get_nodes_from_documents([made])


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_pipelines_upsert_and_delete(
    asynchronous: bool, store: CacheBlendVectorStore, llm: CacheBlendLLM
) -> None:
    pipeline = IngestionPipeline(
        transformations=[*steps(llm), EMBEDDING],
        vector_store=store,
        docstore=SimpleDocumentStore(),
        docstore_strategy=DocstoreStrategy.UPSERTS_AND_DELETE,
    )

    def run(given: list[Document]) -> None:
        if asynchronous:
            asyncio.run(pipeline.arun(documents=given))
        else:
            pipeline.run(documents=given)

    run(documents())
    assert known(llm.open()) == {"one", "two", "three"}
    run([document("one", "Metal"), document("two", "Brick")])
    assert known(llm.open()) == {"one", "two"}
    assert all("Metal" in chunk.text for chunk in llm.open().registry.document("one"))
    assert prompt_hits(llm, "two")
    assert prompt_hits(llm, "three") == []


def test_clearing_evicts_what_the_store_can_list(
    llm: CacheBlendLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CacheBlendVectorStore(SimpleVectorStore(), llm)
    build(store, llm)
    listed = [node for made in documents()[:2] for node in nodes_of(made)]
    monkeypatch.setattr(SimpleVectorStore, "get_nodes", lambda self: listed)
    store.clear()
    assert known(llm.open()) == {"three"}
