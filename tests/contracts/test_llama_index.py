"""What each class of LlamaIndex's package reuses, in each mode, and what it leaves as it was."""

from __future__ import annotations

import asyncio
import json
import pickle
import stat
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from llama_index.core import (
    Document,
    MockEmbedding,
    PromptTemplate,
    Settings,
    StorageContext,
    VectorStoreIndex,
)
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.llms import MockLLM
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.response_synthesizers import ResponseMode, get_response_synthesizer
from llama_index.core.schema import BaseNode, MetadataMode, NodeWithScore
from llama_index.core.vector_stores import SimpleVectorStore
from llama_index.llms.cacheblend import (
    CacheBlendChatMemory,
    CacheBlendLLM,
    CacheBlendPrecompute,
    CacheBlendPromptHelper,
    CacheBlendVectorStore,
    cacheblend_chat_engine,
    cacheblend_query_engine,
    cacheblend_retriever_tool,
    collect_reports,
)
from llama_index.postprocessor.cacheblend import CacheBlendPostprocessor

from cacheblend_rag import ConfigError, Engine, PromptError
from tests.contracts.passages import LEAST, PREFILL, RECOMPUTE_ALL, opened, reused, text_of, tokens
from tests.toy import TOY

QUESTION = "w9 w10 w11"
SPLITTER = SentenceSplitter(
    chunk_size=55,
    chunk_overlap=0,
    tokenizer=str.split,
    id_func=lambda at, document: f"{document.id_}-{at}",
)
SYNTHESES = [
    mode
    for mode in ResponseMode
    if mode not in {ResponseMode.GENERATION, ResponseMode.NO_TEXT, ResponseMode.CONTEXT_ONLY}
]
WITHOUT_STREAMS = {ResponseMode.ACCUMULATE, ResponseMode.COMPACT_ACCUMULATE}
WAYS = ["whole", "async", "stream", "async stream"]
Report = dict[str, Any]


@pytest.fixture(autouse=True)
def _offline_settings() -> None:
    """No test may fall back to a model of LlamaIndex's own."""
    Settings.embed_model, Settings.llm = MockEmbedding(8), MockLLM()


def documents(*names: str) -> list[Document]:
    return [
        Document(text=text_of(name), id_=name, metadata={"file": f"w1{at}"})
        for at, name in enumerate(names or ("one", "two"))
    ]


NODES = SPLITTER.get_nodes_from_documents(documents())
INDEX = VectorStoreIndex(NODES, embed_model=MockEmbedding(8))


def shown(node: BaseNode) -> str:
    return node.get_content(MetadataMode.LLM)


def llm_of(engine: Engine, **fields: Any) -> CacheBlendLLM:
    return CacheBlendLLM(engine=engine, **{"max_tokens": 4, **fields})


def indexed(engine: Engine) -> Engine:
    CacheBlendPrecompute(engine=engine, show_progress=False)(NODES)
    return engine


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """Recomputes nothing, so that every token found is a token reused; knows the nodes."""
    engine = indexed(opened())
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def exact() -> Iterator[Engine]:
    """Knows the nodes, and recomputes all of them."""
    engine = indexed(opened(RECOMPUTE_ALL))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def plain() -> Iterator[Engine]:
    engine = opened(PREFILL)
    yield engine
    engine.close()


def asked(query_engine: Any, way: str) -> tuple[str, list[Report]]:
    """Ask in one of WAYS; return the answer, and the reports of the requests for it."""

    async def whole() -> str:
        response = await query_engine.aquery(QUESTION)
        if way == "async":
            return str(response)
        return "".join([piece async for piece in response.async_response_gen()])

    with collect_reports() as reports:
        if way.startswith("async"):
            return asyncio.run(whole()), reports
        response = query_engine.query(QUESTION)
        return ("".join(response.response_gen) if way == "stream" else str(response)), reports


def synthesis(
    llm: CacheBlendLLM, mode: ResponseMode, way: str, nodes: list[BaseNode] = NODES, **options: Any
) -> Any:
    made = get_response_synthesizer(
        llm=llm,
        prompt_helper=CacheBlendPromptHelper.from_llm(llm),
        response_mode=mode,
        streaming="stream" in way,
        **options,
    )
    index = INDEX if nodes is NODES else VectorStoreIndex(nodes)
    return RetrieverQueryEngine(
        index.as_retriever(similarity_top_k=len(nodes)),
        made,
        node_postprocessors=[CacheBlendPostprocessor(llm=llm)],
    )


# Query engines


@pytest.mark.parametrize("is_chat", [False, True], ids=["completion", "chat"])
@pytest.mark.parametrize("mode", SYNTHESES, ids=lambda mode: mode.value)
def test_each_response_mode_reuses_the_passages_and_answers_as_full_prefill_at_ratio_1(
    mode: ResponseMode, is_chat: bool, engine: Engine, exact: Engine, plain: Engine
) -> None:
    in_all = tokens(engine, map(shown, NODES))
    for way in WAYS[:2] if mode in WITHOUT_STREAMS else WAYS:
        answers = {}
        for one in (engine, exact, plain):
            llm = llm_of(one, is_chat_model=is_chat)
            answers[one], reports = asked(synthesis(llm, mode, way), way)
            if one is engine:
                assert reused(reports) >= LEAST * in_all, way
            assert {report["blended"] for report in reports} <= {one is not plain}
        assert answers[exact] == answers[plain] != "", way


def test_a_template_of_ones_own_is_what_the_model_reads(exact: Engine, plain: Engine) -> None:
    template = PromptTemplate("w20 {context_str} w21 {query_str} w22")
    llm = llm_of(exact, is_chat_model=False)
    query_engine = synthesis(llm, ResponseMode.COMPACT, "whole", text_qa_template=template)
    answer, reports = asked(query_engine, "whole")
    found = INDEX.as_retriever(similarity_top_k=len(NODES)).retrieve(QUESTION)
    context = "\n\n".join(shown(one.node) for one in found)
    prompt = template.format(context_str=context, query_str=QUESTION)
    told = llm_of(plain, is_chat_model=False).complete(prompt, formatted=True)
    assert answer == told.text
    assert reports[0]["prompt_tokens"] == told.additional_kwargs["cacheblend"]["prompt_tokens"]


@pytest.mark.parametrize("source", ["documents", "index"])
def test_documents_or_an_index_become_a_query_engine(source: str) -> None:
    llm, given = llm_of(opened()), documents()
    made = cacheblend_query_engine(
        given if source == "documents" else VectorStoreIndex(NODES),
        llm,
        transformations=[SPLITTER],
        similarity_top_k=4,
        show_progress=False,
    )
    _, (report,) = asked(made, "whole")
    assert [chunk["hit"] for chunk in report["chunks"]] == [True] * 4
    llm.open().close()


@pytest.mark.parametrize("mode", SYNTHESES, ids=lambda mode: mode.value)
def test_an_error_during_a_synthesis_is_raised_and_no_answer(mode: ResponseMode) -> None:
    """LlamaIndex would make an "Empty Response" of a ValueError."""
    engine = opened(template="{{ raise_exception('none') }}")
    refines = mode in {ResponseMode.REFINE, ResponseMode.COMPACT}
    given = [{}, {"structured_answer_filtering": True}] if refines else [{}]
    for options, way in product(given, WAYS[:2] if mode in WITHOUT_STREAMS else WAYS):
        with pytest.raises(PromptError, match="refused the messages: none"):
            asked(synthesis(llm_of(engine), mode, way, **options), way)
    engine.close()


@pytest.mark.parametrize("mode", SYNTHESES, ids=lambda mode: mode.value)
def test_passages_stay_whole_where_not_all_fit_into_a_prompt(mode: ResponseMode) -> None:
    window, nodes = 800, SPLITTER.get_nodes_from_documents(documents(*"abcdefgh"))
    engine = opened()
    CacheBlendPrecompute(engine=engine, show_progress=False)(nodes)
    llm = llm_of(engine, context_window=window, is_chat_model=False)
    _, reports = asked(synthesis(llm, mode, "whole", nodes), "whole")
    chunks = [chunk for report in reports for chunk in report["chunks"]]
    assert all(report["prompt_tokens"] + 4 <= window for report in reports)
    assert chunks
    assert all(chunk["hit"] for chunk in chunks)
    if mode is not ResponseMode.SIMPLE_SUMMARIZE:  # which drops what does not fit
        assert len(reports) > 1
        assert reused(reports) == tokens(engine, map(shown, nodes))
    engine.close()


# Indexing


def test_nodes_pass_unchanged_through_a_pipeline_and_are_known_afterwards() -> None:
    engine, given = opened(), SPLITTER.get_nodes_from_documents(documents())
    steps = [CacheBlendPrecompute(engine=engine, show_progress=False)]
    before = [node.to_dict() for node in given]
    out = IngestionPipeline(transformations=steps, disable_cache=True).run(nodes=given)
    assert [node.to_dict() for node in out] == before
    report = llm_of(engine).complete(shown(out[0])).additional_kwargs["cacheblend"]
    assert [chunk["hit"] for chunk in report["chunks"]] == [True]
    engine.close()


def test_what_is_deleted_from_the_index_is_reused_no_more() -> None:
    engine, (first, second) = opened(), documents()
    llm = llm_of(engine)
    index = VectorStoreIndex.from_documents(
        [first, second],
        storage_context=StorageContext.from_defaults(
            vector_store=CacheBlendVectorStore(SimpleVectorStore(), llm)
        ),
        transformations=[SPLITTER, CacheBlendPrecompute.from_llm(llm, show_progress=False)],
    )

    def hits() -> list[int]:
        found = []
        for document in (first, second):
            texts = map(shown, SPLITTER.get_nodes_from_documents([document]))
            report = llm.complete("\n\n".join(texts)).additional_kwargs["cacheblend"]
            found.append(sum(chunk["hit"] for chunk in report["chunks"]))
        return found

    count = len(SPLITTER.get_nodes_from_documents([first]))
    assert hits() == [count, count]
    index.delete_ref_doc("one", delete_from_docstore=True)
    assert hits() == [0, count]
    asyncio.run(index.adelete_ref_doc("two", delete_from_docstore=True))
    assert hits() == [0, 0]
    engine.close()


# Retrieval


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("score", [4, 3, 2, 1, 5, 0]),
        ("reverse", [0, 5, 1, 2, 3, 4]),
        ("document", [3, 4, 5, 0, 1, 2]),
    ],
)
def test_the_postprocessor_orders_and_drops_nothing(
    order: str, expected: list[int], engine: Engine
) -> None:
    nodes, scores = NODES[:3] + NODES[-3:], [0.1, 0.2, 0.3, 0.35, 0.9, 0.15]
    found = [
        NodeWithScore(node=node, score=score) for node, score in zip(nodes, scores, strict=True)
    ]
    ordered = CacheBlendPostprocessor(llm=llm_of(engine), order=order).postprocess_nodes(found)
    assert [nodes.index(one.node) for one in ordered] == expected


def test_of_documents_with_the_same_text_the_retrieved_one_is_meant_also_side_by_side() -> None:
    engine, shared, nodes = opened(), text_of("shared", 55), []
    for name in "ab":
        document = Document(text=f"{text_of(name, 55)} {shared}", id_=name)
        nodes += SPLITTER.get_nodes_from_documents([document])
    CacheBlendPrecompute(engine=engine, show_progress=False)(nodes)
    llm = llm_of(engine)

    async def meant(node: BaseNode) -> str:
        with collect_reports() as reports:
            found = [NodeWithScore(node=node, score=1.0)]
            await CacheBlendPostprocessor(llm=llm).apostprocess_nodes(found)
            await asyncio.sleep(0.01)
            await llm.acomplete(f"{shown(node)} w9")
        (report,) = reports
        return str(report["chunks"][0]["document_id"])

    async def many() -> list[str]:
        return await asyncio.gather(*(meant(nodes[1 + 2 * (at % 2)]) for at in range(8)))

    assert [shown(node) == shared for node in nodes] == [False, True] * 2
    assert asyncio.run(many()) == ["a", "b"] * 4
    engine.close()


def test_a_retriever_tool_returns_passages_word_for_word(engine: Engine) -> None:
    llm = llm_of(engine)
    tool = cacheblend_retriever_tool(INDEX, llm, similarity_top_k=2, show_progress=False)
    for output in (tool.call(QUESTION), asyncio.run(tool.acall(QUESTION))):
        report = llm.complete(str(output)).additional_kwargs["cacheblend"]
        assert [chunk["hit"] for chunk in report["chunks"]] == [True, True]


# Chat engines


@pytest.mark.parametrize("chat_mode", ["context", "condense_plus_context"])
@pytest.mark.parametrize("source", ["documents", "index"])
@pytest.mark.parametrize("way", WAYS)
def test_each_chat_mode_reuses_what_it_retrieves(chat_mode: str, source: str, way: str) -> None:
    """The nodes of an index that was never precomputed, too."""
    engine = opened()
    chat: Any = cacheblend_chat_engine(
        documents() if source == "documents" else VectorStoreIndex(NODES),
        llm_of(engine),
        chat_mode=chat_mode,
        transformations=[SPLITTER],
        similarity_top_k=2,
        system_prompt="w30",
        show_progress=False,
    )

    async def talk() -> str:
        if way == "async":
            return str(await chat.achat(QUESTION))
        steps = await chat.astream_chat(QUESTION)
        return "".join([piece async for piece in steps.async_response_gen()])

    with collect_reports() as reports:
        if way.startswith("async"):
            text = asyncio.run(talk())
        elif way == "stream":
            text = "".join(chat.stream_chat(QUESTION).response_gen)
        else:
            text = str(chat.chat(QUESTION))
    (report,) = reports
    assert text
    assert [chunk["hit"] for chunk in report["chunks"]] == [True, True]
    engine.close()


def test_turns_are_reused_also_after_a_restart_until_the_chat_is_reset(tmp_path: Path) -> None:
    engine = opened()
    llm = llm_of(engine, max_tokens=12)
    texts = set(map(shown, NODES))

    def turns(memory: CacheBlendChatMemory, question: str) -> int:
        """Count the tokens that are reused beside the passages."""
        chat = cacheblend_chat_engine(
            VectorStoreIndex(NODES), llm, memory=memory, similarity_top_k=2, show_progress=False
        )
        with collect_reports() as reports:
            sources = chat.chat(question).source_nodes
        assert {shown(source.node) for source in sources} <= texts
        return reused(reports) - tokens(engine, [shown(source.node) for source in sources])

    questions = [text_of(name, 20) for name in "abcdef"]
    memory = CacheBlendChatMemory.from_defaults(llm)
    counts = [turns(memory, question) for question in questions[:3]]
    assert counts[0] == 0
    assert 20 <= counts[1] < counts[2]
    kept = tmp_path / "talk.json"
    memory.save(kept)
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    again = CacheBlendChatMemory.load(kept, llm)
    assert again.get_all() == memory.get_all()
    assert turns(again, questions[3]) > counts[2]
    again.reset()
    assert again.get_all() == []
    assert turns(again, questions[4]) == 0
    kept.write_text("{}")
    with pytest.raises(ConfigError, match="holds no conversation"):
        CacheBlendChatMemory.load(kept, llm)
    engine.close()


# Secrets


def test_no_pickle_dict_or_repr_holds_a_key(tmp_path: Path) -> None:
    llm = CacheBlendLLM(engine="http://127.0.0.1:9", model=TOY, api_key="s3cret")
    parts = (llm, CacheBlendPostprocessor(llm=llm), CacheBlendPrecompute.from_llm(llm))
    for part in parts:
        told = [repr(part), str(part), json.dumps(part.to_dict()), repr(pickle.dumps(part))]
        assert not [one for one in told if "s3cret" in one]
        assert type(pickle.loads(pickle.dumps(part))) is type(part)  # noqa: S301 - our own
