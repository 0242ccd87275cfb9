"""Every retrieved passage of a MuSiQue file is found and reused, none in a wrong place.

``CACHEBLEND_MUSIQUE=FILE`` names a file of more questions than the sample here holds.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from llama_index.core import PromptTemplate
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode

from cacheblend_rag.kv.chunk_kv import chunk_id
from llama_index.llms.cacheblend import (
    CacheBlendLLM,
    CacheBlendPrecompute,
    CacheBlendPromptHelper,
    collect_reports,
)
from llama_index.postprocessor.cacheblend import CacheBlendPostprocessor

SAMPLE = Path(__file__).parents[1] / "data" / "musique_3.json"
HEAD = "Answer from the passages.\n\n"
TEMPLATE = PromptTemplate(HEAD + "{context_str}\n\nQuestion: {query_str}\nAnswer:")


class Passages(BaseRetriever):
    """Returns each question's own passages."""

    def __init__(self, nodes: dict[str, list[TextNode]]) -> None:
        super().__init__()
        self._nodes = nodes

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return [NodeWithScore(node=node) for node in self._nodes[query_bundle.query_str]]


def nodes_by_question(path: Path) -> dict[str, list[TextNode]]:
    """One node a passage, equal passages in several questions being several documents."""
    questions = json.loads(path.read_text(encoding="utf-8"))
    return {
        question["question"]: [
            TextNode(id_=f"question-{q}-passage-{p}", text=passage["text"])
            for p, passage in enumerate(question["ctxs"])
        ]
        for q, question in enumerate(questions)
    }


@pytest.mark.timeout(3600)
def test_every_retrieved_passage_is_reused_in_its_place(random_model: Path) -> None:
    nodes = nodes_by_question(Path(os.environ.get("CACHEBLEND_MUSIQUE", SAMPLE)))
    llm = CacheBlendLLM(model=random_model, instruction=HEAD, max_tokens=1, is_chat_model=False)
    precompute = CacheBlendPrecompute.from_llm(llm)
    IngestionPipeline(transformations=[precompute], disable_cache=True).run(
        nodes=[node for found in nodes.values() for node in found]
    )
    query_engine = RetrieverQueryEngine(
        Passages(nodes),
        get_response_synthesizer(
            llm=llm,
            prompt_helper=CacheBlendPromptHelper.from_llm(llm),
            text_qa_template=TEMPLATE,
        ),
        node_postprocessors=[CacheBlendPostprocessor(llm=llm)],
    )
    retrieved = reused = misplaced = tokens = 0
    for question, found in nodes.items():
        with collect_reports() as reports:
            query_engine.query(question)
        (report,) = reports
        hits = {chunk["start"]: chunk for chunk in report["chunks"] if chunk["hit"]}
        expected = places(llm, found)
        retrieved += len(found)
        reused += sum(
            hits[start]["chunk_id"] == name and hits[start]["document_id"] == node.node_id
            for (start, name), node in zip(expected.items(), found, strict=True)
            if start in hits
        )
        misplaced += len(hits.keys() - expected.keys())
        tokens += report["prompt_tokens"]
    print(
        f"\n{len(nodes)} questions, {tokens} prompt tokens: {reused} of {retrieved} retrieved "
        f"passages reused in their place, {misplaced} misplaced"
    )
    assert reused == retrieved
    assert misplaced == 0


def places(llm: CacheBlendLLM, nodes: list[TextNode]) -> dict[int, str]:
    """Return where each passage must stand in the prompt, and its chunk's id."""
    tokenize = llm.open().tokenize
    expected: dict[int, str] = {}
    start = 1 + len(tokenize(HEAD))
    for node in nodes:
        token_ids = tokenize(node.text.strip())
        expected[start] = chunk_id(token_ids)
        start += len(token_ids) + len(tokenize("\n\n"))
    return expected
