from __future__ import annotations

import json

import pytest
from llama_index.core import Document
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.schema import BaseNode, NodeWithScore

from llama_index.llms.cacheblend import CacheBlendLLM, CacheBlendPrecompute
from llama_index.postprocessor.cacheblend import CacheBlendPostprocessor


@pytest.fixture
def node(toy_llm: CacheBlendLLM) -> BaseNode:
    """A node whose KV is stored."""
    document = Document(text=" ".join(f"Sentence {n} is here." for n in range(4)), id_="a")
    (found,) = SentenceSplitter().get_nodes_from_documents([document])
    CacheBlendPrecompute.from_llm(toy_llm, show_progress=False)([found])
    return found


def test_a_node_changed_after_indexing_is_named_in_the_report(
    toy_llm: CacheBlendLLM, node: BaseNode
) -> None:
    old = node.get_content()
    for text, expected in (
        # The old text still stands in the new one, so its KV serves that much of it.
        (f"{old} And more.", [(True, None), (False, "unknown")]),
        ("Nothing of the old text.", [(False, "unknown")]),
        ("", []),
    ):
        node.set_content(text)
        found = [NodeWithScore(node=node, score=1.0)]
        CacheBlendPostprocessor(llm=toy_llm).postprocess_nodes(found)
        response = toy_llm.complete(text or "So.", formatted=True)
        chunks = response.additional_kwargs["cacheblend"]["chunks"]
        assert [(chunk["hit"], chunk["reason"]) for chunk in chunks] == expected


def test_it_is_serialized_with_its_llm(toy_llm: CacheBlendLLM) -> None:
    told = CacheBlendPostprocessor(llm=toy_llm, order="reverse").to_dict()
    assert told["order"] == "reverse"
    assert told["llm"]["class_name"] == "CacheBlendLLM"
    json.dumps(told)
    again = CacheBlendPostprocessor.from_dict(told)
    assert isinstance(again.llm, CacheBlendLLM)
    assert again.to_dict() == told
