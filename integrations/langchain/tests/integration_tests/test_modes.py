"""Ways an application puts passages before the model, and what of them is reused in each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
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
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.outputs import LLMResult
from langchain_core.prompts import ChatPromptTemplate, MessagesPlaceholder, PromptTemplate
from langchain_core.runnables import RunnableLambda
from langchain_core.stores import InMemoryStore
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_text_splitters import RecursiveCharacterTextSplitter

from langchain_cacheblend import (
    DEFAULT_PROMPT,
    CacheBlendCompressor,
    CacheBlendTransformer,
    ChatCacheBlend,
)
from tests.integration_tests.test_retrieval import EMBEDDING, split
from tests.models import random_engine

QUESTION = "Where does she live?"


class Reports(BaseCallbackHandler):
    """Keeps the report of every answer."""

    def __init__(self) -> None:
        self.all: list[dict[str, Any]] = []

    def on_llm_end(self, response: LLMResult, **kwargs: Any) -> None:
        message = response.generations[0][0].message  # type: ignore[union-attr]
        self.all.append(message.response_metadata["cacheblend"])


class App:
    """An index of the demo's notes, a model that knows their passages, and a retriever."""

    def __init__(self) -> None:
        self.llm = ChatCacheBlend(engine=random_engine(recompute_ratio=0.0), max_tokens=3)
        self.chunks = split("recursive")
        CacheBlendTransformer(engine=self.llm.engine).transform_documents(self.chunks)
        self.store = InMemoryVectorStore.from_documents(self.chunks, EMBEDDING)
        self.retriever = self.store.as_retriever()

    def stuffed(self, retriever: Any) -> Any:
        return create_retrieval_chain(
            retriever, create_stuff_documents_chain(self.llm, DEFAULT_PROMPT)
        )


def stuff(app: App) -> Any:
    return app.stuffed(app.retriever)


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
    other = InMemoryVectorStore.from_documents(app.chunks, DeterministicFakeEmbedding(size=8))
    retrievers = [app.retriever, other.as_retriever()]
    return app.stuffed(EnsembleRetriever(retrievers=retrievers, weights=[0.5, 0.5]))


def multi_query(app: App) -> Any:
    return app.stuffed(MultiQueryRetriever.from_llm(app.retriever, app.llm))


def history_aware(app: App) -> Any:
    prompt = ChatPromptTemplate.from_messages(
        [MessagesPlaceholder("chat_history"), ("human", "{input}"), ("human", "Rephrase.")]
    )
    chain = app.stuffed(create_history_aware_retriever(app.llm, app.retriever, prompt))
    history = [HumanMessage("Who is Clara?"), AIMessage("A painter.")]
    return RunnableLambda(lambda values: {**values, "chat_history": history}) | chain


def parents(app: App) -> Any:
    """Small chunks are searched, the passages they were cut from are read."""
    retriever = ParentDocumentRetriever(
        vectorstore=InMemoryVectorStore(EMBEDDING),
        docstore=InMemoryStore(),
        child_splitter=RecursiveCharacterTextSplitter(chunk_size=120, chunk_overlap=0),
    )
    retriever.add_documents(app.chunks)
    return app.stuffed(retriever)


def reader(app: App, text: str) -> LLMChain:
    return LLMChain(llm=app.llm, prompt=PromptTemplate.from_template(text))


def map_reduce(app: App) -> Any:
    reduce = StuffDocumentsChain(
        llm_chain=reader(app, "Join:\n{text}"), document_variable_name="text"
    )
    chain = MapReduceDocumentsChain(
        llm_chain=reader(app, "Read:\n{text}\nQuestion: {question}"),
        reduce_documents_chain=ReduceDocumentsChain(combine_documents_chain=reduce),
        document_variable_name="text",
    )
    return _over_retrieved(app, chain)


def refine(app: App) -> Any:
    chain = RefineDocumentsChain(
        initial_llm_chain=reader(app, "Read:\n{text}\nQuestion: {question}"),
        refine_llm_chain=reader(app, "So far: {answer}\nRead:\n{text}\nQuestion: {question}"),
        document_variable_name="text",
        initial_response_name="answer",
    )
    return _over_retrieved(app, chain)


def _over_retrieved(app: App, chain: Any) -> Any:
    def run(values: dict[str, str], config: Any) -> dict[str, Any]:
        documents = app.retriever.invoke(values["input"])
        chain.invoke({"input_documents": documents, "question": values["input"]}, config)
        return {"context": documents}

    return RunnableLambda(run)


VERBATIM = [stuff, compressed, ensemble, multi_query, history_aware, parents, map_reduce, refine]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("mode", VERBATIM, ids=lambda mode: mode.__name__)
def test_passages_that_reach_the_prompt_word_for_word_are_reused(
    mode: Callable[[App], Any],
) -> None:
    app, reports = App(), Reports()
    outcome = mode(app).invoke({"input": QUESTION}, {"callbacks": [reports]})
    retrieved = sum(app.llm.get_num_tokens(d.page_content) for d in outcome["context"])
    reused = sum(report["reused_tokens"] for report in reports.all)
    assert len(outcome["context"]) >= 3
    assert reused >= 0.95 * retrieved


def test_passages_that_are_rewritten_on_their_way_are_computed() -> None:
    app, reports = App(), Reports()
    altered = RunnableLambda(
        lambda found: [Document(page_content=d.page_content[1:]) for d in found]
    )
    app.stuffed((lambda values: values["input"]) | app.retriever | altered).invoke(
        {"input": QUESTION}, {"callbacks": [reports]}
    )
    assert reports.all[-1]["reused_tokens"] == 0
    assert reports.all[-1]["reason"] == "no known chunk in the prompt"
