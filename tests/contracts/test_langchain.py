"""What each class of LangChain's package reuses, in each chain, and what it leaves as it was."""

from __future__ import annotations

import asyncio
import pickle
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from langchain_cacheblend import (
    DEFAULT_PROMPT,
    CacheBlendChatMessageHistory,
    CacheBlendCompressor,
    CacheBlendTransformer,
    ChatCacheBlend,
    create_cacheblend_chain,
    retrieval_hints,
)
from langchain_classic.chains import create_history_aware_retriever, create_retrieval_chain
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_classic.chains.combine_documents.map_reduce import MapReduceDocumentsChain
from langchain_classic.chains.combine_documents.reduce import ReduceDocumentsChain
from langchain_classic.chains.combine_documents.refine import RefineDocumentsChain
from langchain_classic.chains.combine_documents.stuff import StuffDocumentsChain
from langchain_classic.chains.llm import LLMChain
from langchain_classic.retrievers import (
    ContextualCompressionRetriever,
    EnsembleRetriever,
    MultiQueryRetriever,
    ParentDocumentRetriever,
)
from langchain_classic.retrievers.document_compressors import (
    DocumentCompressorPipeline,
    EmbeddingsFilter,
)
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.load import dumps
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.outputs import LLMResult
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder, PromptTemplate
from langchain_core.runnables import RunnableLambda
from langchain_core.stores import InMemoryStore
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_text_splitters import RecursiveCharacterTextSplitter

from cacheblend_rag import ConfigError, Engine, PromptError
from tests.contracts.passages import LEAST, PREFILL, RECOMPUTE_ALL, opened, reused, text_of, tokens
from tests.toy import TOY

QUESTION = "w9 w10 w11"
EMBEDDING = DeterministicFakeEmbedding(size=16)
SPLITTER = RecursiveCharacterTextSplitter(chunk_size=200, chunk_overlap=0)
SOURCES = [Document(text_of(name), metadata={"source": name}) for name in ("one", "two", "three")]
PASSAGES = SPLITTER.split_documents(SOURCES)
STORE = InMemoryVectorStore.from_documents(PASSAGES, EMBEDDING)
Report = dict[str, Any]
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


class Reports(BaseCallbackHandler):
    """Keeps the report of every answer."""

    def __init__(self) -> None:
        self.all: list[Report] = []

    def on_llm_end(self, response: LLMResult, **kwargs: Any) -> None:
        message: Any = response.generations[0][0]
        self.all.append(message.message.response_metadata["cacheblend"])


class App:
    """A model that knows the passages, their index, and a retriever."""

    def __init__(self, engine: Engine) -> None:
        self.llm = ChatCacheBlend(engine=engine, max_tokens=3)
        self.retriever = STORE.as_retriever()

    def stuffed(self, retriever: Any) -> Any:
        return create_retrieval_chain(
            retriever, create_stuff_documents_chain(self.llm, DEFAULT_PROMPT)
        )

    def over_retrieved(self, chain: Any) -> Any:
        def run(values: dict[str, str], config: Any) -> dict[str, Any]:
            found = self.retriever.invoke(values["input"])
            asked = {"input_documents": found, "question": values["input"]}
            return {"context": found, "answer": chain.invoke(asked, config)["output_text"]}

        return RunnableLambda(run)

    def reader(self, text: str) -> LLMChain:
        return LLMChain(llm=self.llm, prompt=PromptTemplate.from_template(text))


def stuff(app: App) -> Any:
    return app.stuffed(app.retriever)


def cacheblend_chain(app: App) -> Any:
    return create_cacheblend_chain(app.retriever, app.llm)


def compressed(app: App) -> Any:
    pipeline = DocumentCompressorPipeline(
        transformers=[
            EmbeddingsFilter(embeddings=EMBEDDING, k=3),
            CacheBlendCompressor(engine=app.llm.engine, order="reverse"),
        ]
    )
    return app.stuffed(
        ContextualCompressionRetriever(base_compressor=pipeline, base_retriever=app.retriever)
    )


def ensemble(app: App) -> Any:
    other = InMemoryVectorStore.from_documents(PASSAGES, DeterministicFakeEmbedding(size=8))
    retrievers = [app.retriever, other.as_retriever()]
    return app.stuffed(EnsembleRetriever(retrievers=retrievers, weights=[0.5, 0.5]))


def multi_query(app: App) -> Any:
    return app.stuffed(MultiQueryRetriever.from_llm(app.retriever, app.llm))


def history_aware(app: App) -> Any:
    prompt = ChatPromptTemplate.from_messages(
        [MessagesPlaceholder("chat_history"), ("human", "{input}"), ("human", "w20")]
    )
    chain = app.stuffed(create_history_aware_retriever(app.llm, app.retriever, prompt))
    history = [HumanMessage("w21 w22"), AIMessage("w23")]
    return RunnableLambda(lambda values: {**values, "chat_history": history}) | chain


def parents(app: App) -> Any:
    """Small chunks are searched, the passages they were cut from are read."""
    retriever = ParentDocumentRetriever(
        vectorstore=InMemoryVectorStore(EMBEDDING),
        docstore=InMemoryStore(),
        child_splitter=RecursiveCharacterTextSplitter(chunk_size=60, chunk_overlap=0),
    )
    retriever.add_documents(PASSAGES)
    return app.stuffed(retriever)


def map_reduce(app: App) -> Any:
    joined = StuffDocumentsChain(llm_chain=app.reader("w30 {text}"), document_variable_name="text")
    chain = MapReduceDocumentsChain(
        llm_chain=app.reader("w31 {text} w32 {question}"),
        reduce_documents_chain=ReduceDocumentsChain(combine_documents_chain=joined),
        document_variable_name="text",
    )
    return app.over_retrieved(chain)


def refine(app: App) -> Any:
    chain = RefineDocumentsChain(
        initial_llm_chain=app.reader("w31 {text} w32 {question}"),
        refine_llm_chain=app.reader("w33 {answer} w31 {text} w32 {question}"),
        document_variable_name="text",
        initial_response_name="answer",
    )
    return app.over_retrieved(chain)


CHAINS = [
    stuff, cacheblend_chain, compressed, ensemble, multi_query, history_aware, parents,
    map_reduce, refine,
]  # fmt: skip


def indexed(engine: Engine) -> Engine:
    CacheBlendTransformer(engine=engine).transform_documents(PASSAGES)
    return engine


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """Recomputes nothing, so that every token found is a token reused; knows the passages."""
    engine = indexed(opened())
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def exact() -> Iterator[Engine]:
    """Knows the passages, and recomputes all of them."""
    engine = indexed(opened(RECOMPUTE_ALL))
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def plain() -> Iterator[Engine]:
    engine = opened(PREFILL)
    yield engine
    engine.close()


def report_of(message: AIMessage) -> Report:
    return dict(message.response_metadata["cacheblend"])


def hits(report: Report) -> list[bool]:
    return [chunk["hit"] for chunk in report["chunks"]]


# Chains


@pytest.mark.parametrize("chain", CHAINS, ids=lambda chain: chain.__name__)
def test_each_chain_reuses_the_passages_and_answers_as_full_prefill_at_ratio_1(
    chain: Callable[[App], Any], engine: Engine, exact: Engine, plain: Engine
) -> None:
    reports, values = Reports(), {"input": QUESTION}
    outcome = chain(App(engine)).invoke(values, {"callbacks": [reports]})
    texts = [document.page_content for document in outcome["context"]]
    assert len(texts) >= 3
    assert reused(reports.all) >= LEAST * tokens(engine, texts)
    answer = chain(App(exact)).invoke(values)["answer"]
    assert answer == chain(App(plain)).invoke(values)["answer"] != ""


def test_passages_that_are_rewritten_on_their_way_are_computed(engine: Engine) -> None:
    app, reports = App(engine), Reports()
    altered = RunnableLambda(
        lambda found: [Document(" ".join(d.page_content.split()[::-1])) for d in found]
    )
    chain = app.stuffed((lambda values: values["input"]) | app.retriever | altered)
    chain.invoke({"input": QUESTION}, {"callbacks": [reports]})
    assert reused(reports.all) == 0
    assert reports.all[-1]["reason_code"] == "no_chunk"


def test_the_chain_answers_alike_in_every_way_it_is_asked(engine: Engine) -> None:
    chain = create_cacheblend_chain(
        STORE.as_retriever(), ChatCacheBlend(engine=engine, max_tokens=8)
    )
    whole = chain.invoke(QUESTION)
    assert list(whole) == ["input", "context", "answer", "report"]
    assert all(hits(whole["report"]))

    async def others() -> list[str]:
        pieces = [piece async for piece in chain.astream(QUESTION)]
        return [
            (await chain.ainvoke(QUESTION))["answer"],
            *(one["answer"] for one in await chain.abatch([QUESTION] * 16)),
            "".join(piece.get("answer", "") for piece in pieces),
        ]

    pieces = list(chain.stream(QUESTION))
    assert len([piece for piece in pieces if "answer" in piece]) > 4
    assert "report" in pieces[-1]
    answers = [
        "".join(piece.get("answer", "") for piece in pieces),
        *(one["answer"] for one in chain.batch([QUESTION] * 2)),
        *asyncio.run(others()),
    ]
    assert answers == [whole["answer"]] * 21


def test_a_prompt_of_ones_own_is_what_the_model_reads(exact: Engine, plain: Engine) -> None:
    prompt = ChatPromptTemplate.from_messages(
        [("system", "w40"), ("human", "w41 {context} w42 {input}")]
    )
    llm = ChatCacheBlend(engine=exact, max_tokens=8)
    printed = PromptTemplate.from_template("w43 {source} {page_content}")
    chain = create_cacheblend_chain(
        STORE.as_retriever(),
        llm,
        prompt=prompt,
        document_prompt=printed,
        document_separator=" w44 ",
    )
    outcome = chain.invoke(QUESTION)
    passages = [f"w43 {d.metadata['source']} {d.page_content}" for d in outcome["context"]]
    asked = prompt.invoke({"context": " w44 ".join(passages), "input": QUESTION})
    told = ChatCacheBlend(engine=plain, max_tokens=8).invoke(asked)
    assert outcome["answer"] == told.text
    assert outcome["report"]["prompt_tokens"] == report_of(told)["prompt_tokens"]
    assert all(hits(outcome["report"]))


def test_documents_become_a_chain() -> None:
    engine = opened()
    llm = ChatCacheBlend(engine=engine, max_tokens=1)
    outcome = create_cacheblend_chain(PASSAGES, llm, embedding=EMBEDDING, k=5).invoke(QUESTION)
    assert len(outcome["context"]) == 5
    assert hits(outcome["report"]) == [True] * 5
    engine.close()


# The model


def test_the_model_answers_alike_in_every_way_it_is_asked(engine: Engine) -> None:
    llm, text = (
        ChatCacheBlend(engine=engine, max_tokens=8),
        f"{PASSAGES[0].page_content} {QUESTION}",
    )
    answer = llm.invoke(text)
    report = report_of(answer)
    assert hits(report) == [True]
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["input_tokens"] == report["prompt_tokens"]
    assert answer.usage_metadata["output_tokens"] == 8
    cached = answer.usage_metadata["input_token_details"]["cache_read"]
    assert cached == report["reused_tokens"] > 0

    async def others() -> list[str]:
        pieces = [piece.text async for piece in llm.astream(text)]
        return [(await llm.ainvoke(text)).text, (await llm.abatch([text]))[0].text, "".join(pieces)]

    pieces = list(llm.stream(text))
    assert len(pieces) > 4
    joined = sum(pieces[1:], pieces[0])
    assert (joined.usage_metadata, hits(report_of(joined))) == (answer.usage_metadata, [True])
    assert [piece.usage_metadata is not None for piece in pieces[-2:]] == [False, True]
    answers = ["".join(piece.text for piece in pieces), llm.batch([text])[0].text]
    assert [*answers, *asyncio.run(others())] == [answer.text] * 5


def test_a_call_sets_its_own_ratio(engine: Engine, plain: Engine) -> None:
    text = " ".join(passage.page_content for passage in PASSAGES[:3])
    answer = ChatCacheBlend(engine=engine, max_tokens=8).bind(recompute_ratio=1.0).invoke(text)
    assert answer.text == ChatCacheBlend(engine=plain, max_tokens=8).invoke(text).text
    assert report_of(answer)["recompute_ratio"] == 1


def test_errors_of_ours_are_raised(engine: Engine) -> None:
    llm, text = ChatCacheBlend(engine=engine, max_tokens=1), "w5 " * 20_000
    chain = create_cacheblend_chain(RunnableLambda(lambda _: [Document(text)]), llm)
    for ask in (
        lambda: llm.invoke(text),
        lambda: list(llm.stream(text)),
        lambda: asyncio.run(llm.ainvoke(text)),
        lambda: chain.invoke(QUESTION),
        lambda: list(chain.stream(QUESTION)),
        lambda: chain.batch([QUESTION]),
    ):
        with pytest.raises(PromptError, match="tokens"):
            ask()


# Indexing and retrieval


def test_indexing_again_replaces_and_evicting_forgets() -> None:
    engine = opened()
    transformer, llm = CacheBlendTransformer(engine=engine), ChatCacheBlend(engine=engine)
    own = [passage for passage in PASSAGES if passage.metadata["source"] == "one"]

    def found() -> list[int]:
        return [sum(hits(report_of(llm.invoke(p.page_content, max_tokens=1)))) for p in own]

    assert transformer.transform_documents(own) == own
    assert found() == [1] * len(own)
    transformer.transform_documents(own[:-1])
    assert found() == [1] * (len(own) - 1) + [0]
    assert transformer.evict("one") == len(own) - 1
    assert found() == [0] * len(own)
    engine.close()


@pytest.mark.parametrize(
    ("order", "expected"),
    [("score", [2, 4, 6, 0, 1]), ("document", [0, 1, 2, 6, 4]), ("reverse", [1, 0, 6, 4, 2])],
)
def test_the_compressor_orders_and_drops_nothing(
    order: str, expected: list[int], engine: Engine
) -> None:
    """Nor a passage that was never indexed, which stands with those of its document."""
    one, two = ([p for p in PASSAGES if p.metadata["source"] == name] for name in ("one", "two"))
    passages = [*one[:3], *two[:3], Document("w5 w6", metadata={"source": "one"})]
    found = [passages[at] for at in (2, 4, 6, 0, 1)]
    compressor = CacheBlendCompressor(engine=engine, order=order)
    for ordered in (
        compressor.compress_documents(found, ""),
        asyncio.run(compressor.acompress_documents(found, "")),
    ):
        assert [passages.index(passage) for passage in ordered] == expected


def test_hints_travel_within_their_scope_also_side_by_side() -> None:
    """One text in two documents: each request is served the KV of its own."""
    engine, shared = opened(), text_of("shared", 40)
    passages = [
        Document(text, metadata={"source": name})
        for name in "ab"
        for text in (text_of(name, 40), shared)
    ]
    CacheBlendTransformer(engine=engine).transform_documents(passages)
    llm = ChatCacheBlend(engine=engine, max_tokens=1)
    compressor = CacheBlendCompressor(engine=engine)

    async def meant(passage: Document) -> str:
        with retrieval_hints():
            await compressor.acompress_documents([passage], QUESTION)
            await asyncio.sleep(0.01)
            answer = await llm.ainvoke(f"{shared} {QUESTION}")
        return str(report_of(answer)["chunks"][0]["document_id"])

    async def many() -> list[str]:
        return await asyncio.gather(*(meant(passages[1 + 2 * (at % 2)]) for at in range(8)))

    assert asyncio.run(many()) == ["a", "b"] * 4
    for name in "ab":
        report = report_of(llm.invoke(f"{shared} {QUESTION}", hints=[name]))
        assert report["chunks"][0]["document_id"] == name
    engine.close()


# Sessions and secrets


def test_turns_of_a_session_are_reused_also_after_a_restart_until_it_is_cleared(
    tmp_path: Path,
) -> None:
    engine, kept = opened(), tmp_path / "session.json"
    llm = ChatCacheBlend(engine=engine, max_tokens=12)
    prompt = ChatPromptTemplate.from_messages([MessagesPlaceholder("past"), ("human", "{input}")])

    def turns(history: CacheBlendChatMessageHistory, question: str) -> int:
        with history.reused():
            answer = (prompt | llm).invoke({"past": history.messages, "input": question})
        history.add_messages([HumanMessage(question), answer])
        return reused([report_of(answer)])

    questions = [text_of(name, 20) for name in "abcdef"]
    history = CacheBlendChatMessageHistory(llm, kept)
    counts = [turns(history, question) for question in questions[:3]]
    assert counts[0] == 0
    assert 20 <= counts[1] < counts[2]
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    again = CacheBlendChatMessageHistory(llm, kept)
    assert again.messages == history.messages
    assert turns(again, questions[3]) > counts[2]
    assert turns(CacheBlendChatMessageHistory(llm), questions[0]) == 0
    again.clear()
    assert again.messages == []
    assert turns(again, questions[4]) == 0
    kept.write_text("{}")
    with pytest.raises(ConfigError, match="holds no session"):
        CacheBlendChatMessageHistory(llm, kept)
    engine.close()


def test_the_oldest_messages_are_dropped_and_the_rest_is_reused() -> None:
    engine = opened()
    llm = ChatCacheBlend(engine=engine, max_tokens=12)
    history = CacheBlendChatMessageHistory(llm, most_messages=4)
    for name in "abcd":
        with history.reused():
            answer = llm.invoke([*history.messages, HumanMessage(text_of(name, 20))])
        history.add_messages([HumanMessage(text_of(name, 20)), answer])
    assert len(history.messages) == 4
    assert reused([report_of(answer)]) >= 2 * 20
    engine.close()


def test_no_pickle_serialization_or_repr_holds_a_key() -> None:
    llm = ChatCacheBlend(model=TOY, api_key="s3cret", engine="http://127.0.0.1:9")
    told = [repr(llm), str(llm), dumps(llm), llm.model_dump_json(), repr(pickle.dumps(llm))]
    assert not [one for one in told if "s3cret" in one]
    assert pickle.loads(pickle.dumps(llm)).api_key is None  # noqa: S301 - our own
