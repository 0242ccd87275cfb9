"""create_cacheblend_chain: a retrieval chain with index-time KV, hints and report wired in."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator, Sequence
from operator import itemgetter
from typing import Any, Self, cast

from cacheblend_rag import CheckedOptions, ConfigError, PassageOrder
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.prompts import (
    BasePromptTemplate,
    ChatPromptTemplate,
    PromptTemplate,
    format_document,
)
from langchain_core.runnables import (
    Runnable,
    RunnableGenerator,
    RunnableLambda,
    RunnablePassthrough,
)
from langchain_core.runnables.utils import AddableDict
from langchain_core.vectorstores import InMemoryVectorStore
from pydantic import Field, InstanceOf, model_validator

from langchain_cacheblend.chat_models import ChatCacheBlend
from langchain_cacheblend.documents import CacheBlendCompressor, CacheBlendTransformer, to_hints
from langchain_cacheblend.options import prompt_instruction

logger = logging.getLogger(__name__)

Values = dict[str, Any]

DEFAULT_PROMPT = ChatPromptTemplate.from_messages(
    [
        ("system", "Answer the question from the passages below. Give a short answer."),
        ("human", "{context}\n\nQuestion: {input}"),
    ]
)
PAGE_CONTENT = PromptTemplate.from_template("{page_content}")


def create_cacheblend_chain(
    documents_or_retriever: Sequence[Document] | Runnable[str, list[Document]],
    llm: ChatCacheBlend,
    *,
    prompt: BasePromptTemplate[Any] = DEFAULT_PROMPT,
    embedding: Embeddings | None = None,
    k: int = 4,
    document_prompt: BasePromptTemplate[str] = PAGE_CONTENT,
    document_separator: str = "\n\n",
    order: PassageOrder | str = PassageOrder.SCORE,
    collection: str = "",
) -> Runnable[str | Values, Values]:
    """Return a chain from a question to ``input``, ``context``, ``answer`` and ``report``.

    Args:
        documents_or_retriever: split Documents, which are precomputed and put into an in-memory
            vector store, or a retriever over Documents that CacheBlendTransformer has seen.
        llm: where neither its engine is open nor its ``instruction`` given, it takes the
            instruction from ``prompt``: what prompts say before their first passage.
        prompt: takes ``context`` (the passages' text) and ``input`` (the question).
        embedding: how Documents are embedded; only with Documents.
        k: how many are retrieved; only with Documents.
        document_prompt: how passages are printed. Text around ``page_content`` is computed,
            ``page_content`` itself is reused.
        document_separator: what joins them.
        order: as in CacheBlendCompressor.
        collection: as in CacheBlendTransformer.

    Returns:
        A chain that takes a question, or a dict with ``input`` and what else the prompt asks for.
        Its ``answer`` is text, streamed piece by piece; ``report`` comes last.

    Raises:
        ConfigError: before a model is loaded, for an argument of another kind, for a prompt that
            takes no ``context``, and for Documents without an ``embedding``.
    """
    given = _Given(**locals())
    source = given.documents_or_retriever
    _settle_instruction(llm, prompt)
    compressor = CacheBlendCompressor(engine=llm.engine, order=given.order)

    def compress(values: Values) -> Sequence[Document]:
        return compressor.compress_documents(values["context"], values["input"])

    def ask(values: Values) -> Runnable[Values, Any]:
        passages = document_separator.join(
            format_document(document, document_prompt) for document in values["context"]
        )
        hints = to_hints(values["context"])
        return (
            RunnablePassthrough.assign(context=lambda _: passages) | prompt | llm.bind(hints=hints)
        )

    if not isinstance(source, Runnable):
        CacheBlendTransformer(engine=llm.engine, collection=collection).precompute(source)
        store = InMemoryVectorStore.from_documents(source, cast("Embeddings", embedding))
        source = store.as_retriever(search_kwargs={"k": k})
    chain = (
        RunnableLambda(_as_values)
        | RunnablePassthrough.assign(context=itemgetter("input") | source)
        | RunnablePassthrough.assign(context=RunnableLambda(compress))
        | RunnablePassthrough.assign(message=RunnableLambda(ask))
        | RunnableGenerator(_answers, _aanswers)
    )
    return chain.with_config(run_name="cacheblend_chain")


class _Given(CheckedOptions):
    """The arguments of create_cacheblend_chain, checked."""

    documents_or_retriever: InstanceOf[Runnable[Any, Any]] | list[InstanceOf[Document]]
    llm: InstanceOf[ChatCacheBlend]
    prompt: InstanceOf[BasePromptTemplate[Any]]
    embedding: InstanceOf[Embeddings] | None
    k: int = Field(ge=1)
    document_prompt: InstanceOf[BasePromptTemplate[Any]]
    document_separator: str
    order: PassageOrder
    collection: str

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        wanted = {"prompt": "context", "document_prompt": "page_content"}
        for name, variable in wanted.items():
            taken = getattr(self, name).input_variables
            if variable not in taken:
                raise ConfigError(f"{name} must take {variable!r}, not only {taken}")
        if self.documents_or_retriever == []:
            raise ConfigError("documents_or_retriever holds no Document: give some, or a retriever")
        if self.embedding is None and not isinstance(self.documents_or_retriever, Runnable):
            raise ConfigError("embedding must be given together with Documents")
        return self


def _settle_instruction(llm: ChatCacheBlend, prompt: BasePromptTemplate[Any]) -> None:
    if not llm.is_open and llm.instruction is None:
        llm.instruction = prompt
    elif llm.engine.instruction != prompt_instruction(prompt, llm.engine.tokenizer):
        logger.warning(
            "passages are computed after another instruction than this prompt's: "
            "open the model with instruction=prompt"
        )


def _as_values(question: str | Values) -> Values:
    values = {"input": question} if isinstance(question, str) else question
    if not isinstance(values, dict) or not isinstance(values.get("input"), str):
        raise ConfigError("the chain takes a question, or a dict that holds it as 'input'")
    return values


def _answers(pieces: Iterator[Values]) -> Iterator[Values]:
    yield from map(_without_message, pieces)


async def _aanswers(pieces: AsyncIterator[Values]) -> AsyncIterator[Values]:
    async for piece in pieces:
        yield _without_message(piece)


def _without_message(piece: Values) -> AddableDict:
    """Return the piece with the model's message taken apart into answer and report."""
    values = AddableDict(piece)
    if (message := values.pop("message", None)) is not None:
        values["answer"] = message.text
        if report := message.response_metadata.get("cacheblend"):
            values["report"] = report
    return values
