"""Answers on the demo corpus: through LlamaIndex as the plain engine gives them.

``CACHEBLEND_QUESTIONS=500`` asks so many questions a setting.
"""

from __future__ import annotations

import os

import pytest
from llama_index.core import PromptTemplate
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.core.schema import (
    NodeRelationship,
    NodeWithScore,
    QueryBundle,
    RelatedNodeInfo,
    TextNode,
)
from toy import INSTRUCTION, SETTINGS, TOY, DemoPrompt, generate_prompts

from cacheblend_rag import (
    BlendConfig,
    BlendPrompt,
    Chunk,
    Document,
    Engine,
    SamplingParams,
    open_engine,
)
from cacheblend_rag.quality.metrics import exact_match
from llama_index.llms.cacheblend import (
    CacheBlendLLM,
    CacheBlendPrecompute,
    CacheBlendPromptHelper,
    collect_reports,
)
from llama_index.postprocessor.cacheblend import CacheBlendPostprocessor

QUESTIONS = int(os.environ.get("CACHEBLEND_QUESTIONS", "8"))
SEED = 1
MAX_TOKENS = 8
HEAD = f"{INSTRUCTION}\n\n"
TEMPLATE = PromptTemplate(HEAD + "{context_str}\n\nQuestion: {query_str}\nAnswer:")
CONFIG = BlendConfig(selector="prior", recompute_ratio=0.15, cost_model=False)


class FixedRetriever(BaseRetriever):
    """Returns the nodes it was made with, best first."""

    def __init__(self, nodes: list[TextNode]) -> None:
        super().__init__()
        self._nodes = nodes

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return [
            NodeWithScore(node=node, score=1.0 - place / 100)
            for place, node in enumerate(self._nodes)
        ]


def nodes_of(prompt: DemoPrompt) -> dict[tuple[int, int], TextNode]:
    """The prompt's documents as a node parser would cut them, by document and chunk."""
    nodes: dict[tuple[int, int], TextNode] = {}
    for d, document in enumerate(prompt.documents):
        for c, text in enumerate(document.chunks):
            node = nodes[d, c] = TextNode(id_=f"{document.document_id}/{c}", text=text)
            source = RelatedNodeInfo(node_id=document.document_id)
            node.relationships[NodeRelationship.SOURCE] = source
            if c:
                before = nodes[d, c - 1]
                node.relationships[NodeRelationship.PREVIOUS] = before.as_related_node_info()
                before.relationships[NodeRelationship.NEXT] = node.as_related_node_info()
    return nodes


def ask_llama_index(llm: CacheBlendLLM, prompt: DemoPrompt) -> str:
    nodes = nodes_of(prompt)
    retrieved = [nodes[place] for place in prompt.retrieved]
    CacheBlendPrecompute.from_llm(llm, show_progress=False)(list(nodes.values()))
    query_engine = RetrieverQueryEngine(
        FixedRetriever(retrieved),
        get_response_synthesizer(
            llm=llm,
            prompt_helper=CacheBlendPromptHelper.from_llm(llm),
            text_qa_template=TEMPLATE,
        ),
        node_postprocessors=[CacheBlendPostprocessor(llm=llm)],
    )
    with collect_reports() as reports:
        answer = str(query_engine.query(prompt.question.conversation))
    (report,) = reports
    assert len([chunk for chunk in report["chunks"] if chunk["hit"]]) == len(retrieved)
    for document in prompt.documents:
        llm.open().evict_document(document.document_id)
    return answer


def ask_plainly(engine: Engine, prompt: DemoPrompt) -> str:
    """Ask as `cacheblend-rag eval` does: explicit segments, documents precomputed and evicted."""
    documents = [Document(d.document_id, d.chunks) for d in prompt.documents]
    chunks = [document.to_chunks() for document in documents]
    parts: list[str | Chunk] = [HEAD]
    for index, (d, c) in enumerate(prompt.retrieved):
        parts += ["\n\n", chunks[d][c]] if index else [chunks[d][c]]
    parts.append(f"\n\nQuestion: {prompt.question.conversation}\nAnswer:")
    engine.precompute(documents, progress=False)
    answer = engine.generate(BlendPrompt.of(*parts), SamplingParams(max_tokens=MAX_TOKENS))
    for document in documents:
        engine.evict_document(document.document_id)
    return answer.text


@pytest.fixture(scope="module")
def engine() -> Engine:
    return open_engine("transformers", model=TOY, config=CONFIG, instruction=HEAD)


@pytest.fixture(scope="module")
def answering() -> CacheBlendLLM:
    return CacheBlendLLM(
        model=TOY,
        engine="transformers",
        blend_config=CONFIG,
        instruction=HEAD,
        max_tokens=MAX_TOKENS,
        is_chat_model=False,
    )


@pytest.mark.parametrize("setting", SETTINGS)
def test_answers_are_within_a_point_of_the_plain_engines(
    setting: str, engine: Engine, answering: CacheBlendLLM
) -> None:
    plain = ours = equal = 0.0
    prompts = generate_prompts(setting, QUESTIONS, SEED)
    for prompt in prompts:
        answers = (prompt.question.answer,)
        expected, told = ask_plainly(engine, prompt), ask_llama_index(answering, prompt)
        plain += exact_match(expected, answers)
        ours += exact_match(told, answers)
        equal += told.strip() == expected.strip()
    count = len(prompts)
    print(
        f"\n{setting}, {count} questions: plain engine {100 * plain / count:.1f} %, "
        f"LlamaIndex {100 * ours / count:.1f} %, equal answers {100 * equal / count:.1f} %"
    )
    assert abs(plain - ours) <= 0.01 * count
