"""What an index does: KV is computed when nodes are indexed, and evicted with their documents."""

from __future__ import annotations

import asyncio
import json
import pickle
from pathlib import Path
from typing import Any

import faiss
import pytest
from llama_index.core import Document, MockEmbedding
from llama_index.core.ingestion import DocstoreStrategy, IngestionPipeline
from llama_index.core.llms import MockLLM
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import BaseNode, NodeRelationship, RelatedNodeInfo, TextNode
from llama_index.core.storage.docstore import SimpleDocumentStore
from llama_index.core.vector_stores import SimpleVectorStore
from llama_index.vector_stores.faiss import FaissMapVectorStore
from toy import TOY

from cacheblend_rag import ConfigError, Engine, StoreConfig
from llama_index.llms.cacheblend import CacheBlendLLM, CacheBlendPrecompute, CacheBlendVectorStore
from llama_index.llms.cacheblend.indexing import source_documents

SMALL = {"blend_config": {"min_tokens": 0}, "instruction": "Notes:\n", "show_progress": False}


@pytest.fixture
def precompute(tmp_path: Path) -> CacheBlendPrecompute:
    return CacheBlendPrecompute(model=TOY, kv_path=tmp_path / "kv", **SMALL)


def split(text: str, name: str = "doc", size: int = 40) -> list[BaseNode]:
    document = Document(text=text, id_=name, metadata={"file": f"{name}.txt"})
    return SentenceSplitter(chunk_size=size, chunk_overlap=0).get_nodes_from_documents([document])


def sentences(count: int, word: str = "stone") -> str:
    return " ".join(f"Sentence {n} says that {word} number {n} is heavy." for n in range(count))


def found(engine: Engine, text: str) -> list[tuple[bool, str | None]]:
    report = engine.generate(f"Notes:\n{text}\n\nQuestion?").report
    return [(chunk.hit, chunk.reason) for chunk in report.chunks]


def test_chunks_know_what_precedes_them(precompute: CacheBlendPrecompute) -> None:
    nodes = split(sentences(12))
    precompute(nodes[:1])  # a part of a document replaces nothing
    precompute(nodes[1:])
    text = "\n\n".join(node.get_content("llm") for node in nodes)
    assert all(hit for hit, _ in found(precompute.open(), text))
    precompute(nodes[::-1])
    chunks = precompute.open().registry.document("doc")
    shown = [chunk for chunk in chunks if chunk.text.startswith("file: doc.txt")]
    assert [len(chunk.context) for chunk in shown] == [2 * n for n in range(len(nodes))]
    assert shown[1].context == (nodes[0].get_content("llm"), "\n\n")


def test_chunks_know_nothing_beyond_their_boundary(precompute: CacheBlendPrecompute) -> None:
    nodes = split(sentences(12))
    for node in nodes[2:]:
        node.metadata["cacheblend_boundary"] = ["everybody"]
        node.excluded_llm_metadata_keys = ["cacheblend_boundary"]
    empty = TextNode(text="", relationships=nodes[0].relationships)
    precompute([*nodes, empty])
    engine = precompute.open()
    for show in ("llm", "none"):
        texts = [node.get_content(show) for node in nodes]
        chunks = [engine.registry.variants(text)[0] for text in texts]
        assert [len(chunk.context) for chunk in chunks[:4]] == [0, 2, 0, 2]
        assert chunks[3].context == (texts[2], "\n\n")


def test_the_kv_of_the_shown_text_serves_the_bare_text_in_every_form(
    precompute: CacheBlendPrecompute,
) -> None:
    nodes = split(sentences(40), size=240)[:2]
    precompute(nodes)
    engine, texts = precompute.open(), [node.get_content() for node in nodes]
    least = 0.85 * sum(len(engine.tokenize(text)) for text in texts)
    for form in (
        "\n\n".join(texts),
        "\n\n".join(f"Source {n}:\n{text}\n" for n, text in enumerate(texts)),
        str(texts),
        json.dumps([{"text": text, "score": 0.5} for text in texts]),
    ):
        report = engine.generate(f"{form}\n\nQuestion?").report
        assert report.reused_tokens >= least, form
        assert all(chunk.hit for chunk in report.chunks), form


def test_bad_nodes_are_skipped_and_named(
    precompute: CacheBlendPrecompute, caplog: pytest.LogCaptureFixture
) -> None:
    source = {NodeRelationship.SOURCE: RelatedNodeInfo(node_id="doc")}
    texts = {"empty": " \n", "broken": "half a \ud83d pair", "good": "Sentence {n} with {braces}."}
    nodes = [TextNode(id_=name, text=text, relationships=source) for name, text in texts.items()]
    precompute(nodes)
    assert "node empty holds no text" in caplog.text
    assert "node broken holds an unpaired surrogate" in caplog.text
    assert found(precompute.open(), texts["good"]) == [(True, None)]


def test_it_shares_the_engine_of_its_llm() -> None:
    llm = CacheBlendLLM(model=TOY, system_prompt="Be brief.", is_chat_model=False)
    precompute = CacheBlendPrecompute.from_llm(llm)
    assert precompute.instruction == llm.resolve_instruction()
    assert precompute.instruction.startswith("Be brief.")
    assert precompute.open() is llm.open()
    given = CacheBlendLLM(engine=llm.open())
    assert CacheBlendPrecompute.from_llm(given).open() is llm.open()


def test_what_no_worker_could_share_is_not_pickled() -> None:
    for fields in ({"model": TOY}, {"engine": CacheBlendLLM(model=TOY).open()}):
        with pytest.raises(ConfigError, match="kv_path"):
            pickle.dumps(CacheBlendPrecompute(**fields))


def test_what_changes_the_kv_changes_the_ingestion_key() -> None:
    def key(**fields: Any) -> str:
        return str(CacheBlendPrecompute(**{"model": TOY, **fields}).to_dict())

    plain = key()
    changes: list[dict[str, Any]] = [
        {"model": "/other"},
        {"kv_path": "kv"},
        {"instruction": "Read:"},
        {"namespace": "other"},
        {"dtype": "bfloat16"},
        {"register_only": True},
        {"blend_config": {"min_tokens": 3}},
        {"lead_in": "none"},
        {"lead_in": {"document_window": 512}},
    ]
    assert len({plain, *(key(**change) for change in changes)}) == len(changes) + 1
    assert key(show_progress=False, host_bytes=1 << 20, device="cpu") == plain
    assert key(fill_on_miss=True) == plain
    assert key(store=StoreConfig(host_bytes=5, disk_bytes=6)) == plain
    assert key(store=StoreConfig(kv_path="kv")) == key(kv_path="kv")


def test_what_the_llm_has_settled_is_refused() -> None:
    llm = CacheBlendLLM(model=TOY)
    with pytest.raises(ConfigError, match="namespace: fixed by the llm: leave it out"):
        CacheBlendPrecompute.from_llm(llm, namespace="other")
    with pytest.raises(ConfigError, match="llm is a MockLLM: give a CacheBlendLLM"):
        CacheBlendPrecompute.from_llm(MockLLM())


def node(name: str, source: str | None = "d", start: int | None = None) -> TextNode:
    made = TextNode(id_=name, text=f" text of {name} \n", start_char_idx=start)
    if source:
        made.relationships[NodeRelationship.SOURCE] = RelatedNodeInfo(node_id=source)
    return made


def test_offsets_order_nodes_and_a_missing_neighbour_makes_a_part() -> None:
    (source,) = source_documents([node("a", start=9), node("b", start=3)])
    assert [n.node_id for n in source.nodes] == ["b", "a"]
    (source,) = source_documents([node("a", start=9), node("b")])
    assert [n.node_id for n in source.nodes] == ["a", "b"]
    assert source.whole
    cut = node("b")
    cut.relationships[NodeRelationship.PREVIOUS] = RelatedNodeInfo(node_id="a")
    (part, alone) = source_documents([cut, node("alone", source=None)])
    assert (part.whole, alone.document_id) == (False, "alone")


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
def test_pipelines_upsert_and_delete(asynchronous: bool, precompute: CacheBlendPrecompute) -> None:
    vectors = FaissMapVectorStore(faiss.IndexIDMap2(faiss.IndexFlatL2(4)))
    pipeline = IngestionPipeline(
        transformations=[SentenceSplitter(), precompute, MockEmbedding(4)],
        vector_store=CacheBlendVectorStore(vectors, precompute),
        docstore=SimpleDocumentStore(),
        docstore_strategy=DocstoreStrategy.UPSERTS_AND_DELETE,
    )

    def known_after(**texts: str) -> set[str]:
        given = [Document(text=text, id_=name) for name, text in texts.items()]
        if asynchronous:
            asyncio.run(pipeline.arun(documents=given))
        else:
            pipeline.run(documents=given)
        registry = precompute.open().registry
        return {chunk.text for name in ("a", "b", "c") for chunk in registry.document(name)}

    stone, brick, board, metal = (sentences(2, word) for word in ("stone", "brick", "board", "tin"))
    assert known_after(a=stone, b=brick, c=board) == {stone, brick, board}
    assert known_after(a=metal, b=brick) == {metal, brick}
    assert found(precompute.open(), brick) == [(True, None)]
    assert found(precompute.open(), board) == []


def test_clearing_evicts_what_the_store_can_list(
    precompute: CacheBlendPrecompute, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = [*split(sentences(2), "a"), *split(sentences(2), "b")]
    precompute(nodes)
    monkeypatch.setattr(SimpleVectorStore, "get_nodes", lambda self: nodes[:1])
    CacheBlendVectorStore(SimpleVectorStore(), precompute).clear()
    registry = precompute.open().registry
    assert [bool(registry.document(name)) for name in "ab"] == [False, True]
