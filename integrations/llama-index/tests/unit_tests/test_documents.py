from __future__ import annotations

import random

from llama_index.core import Document
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import NodeRelationship, RelatedNodeInfo, TextNode

from llama_index.llms.cacheblend.documents import (
    bare_text,
    document_id,
    shown_text,
    source_documents,
)


def node(name: str, source: str | None = "d", start: int | None = None) -> TextNode:
    made = TextNode(id_=name, text=f" text of {name} \n", start_char_idx=start)
    if source:
        made.relationships[NodeRelationship.SOURCE] = RelatedNodeInfo(node_id=source)
    return made


def test_texts_are_stripped_and_hold_what_llms_see() -> None:
    made = TextNode(
        text="  a text\n", metadata={"page": 3, "size": 1}, excluded_llm_metadata_keys=["size"]
    )
    assert shown_text(made) == "page: 3\n\n  a text"
    assert bare_text(made) == "a text"


def test_nodes_follow_their_relations() -> None:
    text = " ".join(f"Sentence number {n} stands here." for n in range(60))
    nodes = SentenceSplitter(chunk_size=40, chunk_overlap=0).get_nodes_from_documents(
        [Document(text=text, id_="d"), Document(text=text.upper(), id_="e")]
    )
    shuffled = random.Random(3).sample(nodes, len(nodes))
    found = {source.document_id: source for source in source_documents(shuffled)}
    assert [n.node_id for n in found["d"].nodes] == [
        n.node_id for n in nodes if n.ref_doc_id == "d"
    ]
    assert found["d"].whole
    assert found["e"].whole


def test_offsets_order_nodes_without_relations() -> None:
    (source,) = source_documents([node("a", start=9), node("b", start=3)])
    assert [n.node_id for n in source.nodes] == ["b", "a"]
    (source,) = source_documents([node("a", start=9), node("b")])
    assert [n.node_id for n in source.nodes] == ["a", "b"]


def test_a_missing_neighbour_makes_a_part() -> None:
    cut = node("b")
    cut.relationships[NodeRelationship.PREVIOUS] = RelatedNodeInfo(node_id="a")
    (source,) = source_documents([cut])
    assert not source.whole


def test_a_node_without_source_is_a_document() -> None:
    alone = node("alone", source=None)
    assert document_id(alone) == "alone"
    assert [s.document_id for s in source_documents([alone, node("b")])] == ["alone", "d"]
