from __future__ import annotations

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
from toy import TOY

from cacheblend_rag.errors import ConfigError
from llama_index.llms.cacheblend import CacheBlendLLM, CacheBlendPrecompute
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

    changed.set_content("")
    CacheBlendPostprocessor(llm=llm).postprocess_nodes(scored([changed], [1.0]))
    assert llm.complete("So.", formatted=True).additional_kwargs["cacheblend"]["chunks"] == []


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
    given = {"llm": CacheBlendLLM(model=TOY)} if options else {}
    with pytest.raises(ConfigError) as raised:
        CacheBlendPostprocessor(**{**given, **options})
    assert str(raised.value) == told


@pytest.mark.parametrize(
    "module", ["llama_index.postprocessor.cacheblend", "llama_index.llms.cacheblend"]
)
def test_either_package_can_be_imported_first(module: str) -> None:
    subprocess.run([sys.executable, "-c", f"import {module}"], check=True)  # noqa: S603
