from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from llama_index.core import Document
from llama_index.core.llms import MockLLM
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import BaseNode, NodeWithScore

from cacheblend_rag.errors import ConfigError
from llama_index.llms.cacheblend import CacheBlendLLM, CacheBlendPrecompute, collect_reports
from llama_index.postprocessor.cacheblend import CacheBlendPostprocessor


@pytest.fixture
def llm(random_model: Path, request: pytest.FixtureRequest) -> CacheBlendLLM:
    """Of a namespace of its own: LLMs with equal settings share an engine while it lives."""
    return CacheBlendLLM(
        model=random_model,
        namespace=request.node.name,
        instruction="",
        blend_config={"min_tokens": 0},
        max_tokens=2,
        is_chat_model=False,
    )


@pytest.fixture
def nodes(llm: CacheBlendLLM) -> list[BaseNode]:
    """Three nodes of document a, then three of document b, whose first is the same text."""
    texts = {
        name: " ".join(f"{'same' if n < 3 else name} sentence {n} is here." for n in range(9))
        for name in "ab"
    }
    documents = [Document(text=text, id_=name) for name, text in texts.items()]
    found = SentenceSplitter(chunk_size=24, chunk_overlap=0).get_nodes_from_documents(documents)
    assert len(found) == 6
    CacheBlendPrecompute.from_llm(llm, show_progress=False)(found)
    return found


def scored(nodes: list[BaseNode], scores: list[float | None]) -> list[NodeWithScore]:
    return [NodeWithScore(node=node, score=s) for node, s in zip(nodes, scores, strict=True)]


SCORES = [0.1, 0.2, 0.3, 0.35, 0.9, 0.15]


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("score", [4, 3, 2, 1, 5, 0]),
        ("reverse", [0, 5, 1, 2, 3, 4]),
        ("document", [3, 4, 5, 0, 1, 2]),
    ],
)
def test_orders(order: str, expected: list[int], llm: CacheBlendLLM, nodes: list[BaseNode]) -> None:
    ordered = CacheBlendPostprocessor(llm=llm, order=order).postprocess_nodes(scored(nodes, SCORES))
    assert [nodes.index(found.node) for found in ordered] == expected


def test_nodes_without_scores_keep_their_order(llm: CacheBlendLLM, nodes: list[BaseNode]) -> None:
    ordered = CacheBlendPostprocessor(llm=llm).postprocess_nodes(scored(nodes, [None] * 6))
    assert [found.node for found in ordered] == nodes


def variants_used(llm: CacheBlendLLM, retrieved: list[BaseNode]) -> set[str]:
    """Ask about the node's text, which stands in both documents, and tell whose KV was used."""

    async def query() -> set[str]:
        postprocessor = CacheBlendPostprocessor(llm=llm)
        with collect_reports() as reports:
            found = await postprocessor.apostprocess_nodes(scored(retrieved, [1.0]))
            await asyncio.sleep(0)
            await llm.acomplete(f"{found[0].node.get_content()}\nWhat?", formatted=True)
        return {chunk["document_id"] for chunk in reports[0]["chunks"]}

    return asyncio.run(query())


def test_hints_choose_among_documents_with_the_same_text(
    llm: CacheBlendLLM, nodes: list[BaseNode]
) -> None:
    first_of_a, first_of_b = nodes[0], nodes[3]
    assert first_of_a.get_content() == first_of_b.get_content()
    assert variants_used(llm, [first_of_a]) == {"a"}
    assert variants_used(llm, [first_of_b]) == {"b"}


def test_hints_of_concurrent_queries_do_not_mix(llm: CacheBlendLLM, nodes: list[BaseNode]) -> None:
    async def query(node: BaseNode) -> bool:
        with collect_reports() as reports:
            await CacheBlendPostprocessor(llm=llm).apostprocess_nodes(scored([node], [1.0]))
            await asyncio.sleep(0.01)
            await llm.acomplete(f"{node.get_content()}\nWhat?", formatted=True)
        return bool(reports[0]["chunks"][0]["document_id"] == node.ref_doc_id)

    async def many() -> list[bool]:
        return await asyncio.gather(*(query(nodes[3 * (n % 2)]) for n in range(16)))

    assert all(asyncio.run(many()))


def test_a_node_changed_after_indexing_is_named_in_the_report(
    llm: CacheBlendLLM, nodes: list[BaseNode]
) -> None:
    changed = nodes[1].model_copy(deep=True)
    changed.set_content(nodes[1].get_content() + " And more.")
    CacheBlendPostprocessor(llm=llm).postprocess_nodes(scored([changed], [1.0]))
    # The old text still stands in the new one, so its KV serves that much of it.
    response = llm.complete(changed.get_content(), formatted=True)
    chunks = response.additional_kwargs["cacheblend"]["chunks"]
    assert [(c["hit"], c["reason"]) for c in chunks] == [(True, None), (False, "unknown")]

    changed.set_content("Nothing of the old text.")
    CacheBlendPostprocessor(llm=llm).postprocess_nodes(scored([changed], [1.0]))
    response = llm.complete(changed.get_content(), formatted=True)
    (chunk,) = response.additional_kwargs["cacheblend"]["chunks"]
    assert (chunk["hit"], chunk["reason"]) == (False, "unknown")


def test_it_is_serialized_with_its_llm(llm: CacheBlendLLM) -> None:
    told = CacheBlendPostprocessor(llm=llm, order="reverse").to_dict()
    assert told["order"] == "reverse"
    assert told["llm"]["class_name"] == "CacheBlendLLM"
    json.dumps(told)
    again = CacheBlendPostprocessor.from_dict(told)
    assert isinstance(again.llm, CacheBlendLLM)
    assert again.to_dict() == told


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"llm": MockLLM()}, "llm is a MockLLM: give a CacheBlendLLM"),
        ({"order": "best"}, "order must be 'score', 'document' or 'reverse'"),
        (
            {"ordr": "score"},
            "unknown option 'ordr' of CacheBlendPostprocessor (did you mean 'order'?)",
        ),
        ({}, "llm: Field required"),
    ],
)
def test_wrong_options_are_refused_in_a_line(options: dict[str, Any], told: str) -> None:
    given = {"llm": CacheBlendLLM(model="demo")} if options else {}
    with pytest.raises(ConfigError) as raised:
        CacheBlendPostprocessor(**{**given, **options})
    assert str(raised.value) == told


@pytest.mark.parametrize(
    "module", ["llama_index.postprocessor.cacheblend", "llama_index.llms.cacheblend"]
)
def test_either_package_can_be_imported_first(module: str) -> None:
    subprocess.run([sys.executable, "-c", f"import {module}"], check=True)  # noqa: S603
