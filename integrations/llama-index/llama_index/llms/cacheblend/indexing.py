"""An index whose nodes' KV is stored, made of documents or of an index that there is."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from llama_index.core import Settings, StorageContext, VectorStoreIndex
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.embeddings.utils import EmbedType, resolve_embed_model
from llama_index.core.indices.base import BaseIndex
from llama_index.core.ingestion.pipeline import remove_unstable_values
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.schema import BaseNode, Document, TransformComponent
from llama_index.core.vector_stores import SimpleVectorStore
from llama_index.core.vector_stores.types import BasePydanticVectorStore

from cacheblend_rag import Arguments, ConfigError, PassageOrder
from llama_index.llms.cacheblend.documents import checked_nodes
from llama_index.llms.cacheblend.llm import CacheBlendLLM
from llama_index.llms.cacheblend.precompute import CacheBlendPrecompute
from llama_index.llms.cacheblend.vector_store import CacheBlendVectorStore
from llama_index.postprocessor.cacheblend.postprocessor import CacheBlendPostprocessor

Source = Sequence[Document] | BaseIndex[Any]


class PassageOptions(TypedDict, total=False):
    """Which passages are indexed, and which retrieved: arguments of cacheblend_query_engine."""

    transformations: Sequence[TransformComponent] | None
    embed_model: EmbedType | None
    vector_store: BasePydanticVectorStore | None
    similarity_top_k: int
    node_postprocessors: Sequence[BaseNodePostprocessor]
    order: PassageOrder | str
    collection: str | None
    show_progress: bool


OPTIONS = Arguments("argument", frozenset(PassageOptions.__annotations__))


@dataclass(frozen=True)
class Passages:
    """Where an engine or a tool finds its passages.

    llm: its engine computes the KV. source: documents, which become an index, or an index that
    there is, which only gets its nodes' KV. The others are as for cacheblend_query_engine.
    """

    llm: CacheBlendLLM
    source: Source
    transformations: Sequence[TransformComponent] | None = None
    embed_model: EmbedType | None = None
    vector_store: BasePydanticVectorStore | None = None
    similarity_top_k: int = 4
    node_postprocessors: Sequence[BaseNodePostprocessor] = ()
    order: PassageOrder | str = PassageOrder.SCORE
    collection: str | None = None
    show_progress: bool = True

    @classmethod
    def of(cls, source: Source, llm: CacheBlendLLM | None, options: Mapping[str, Any]) -> Passages:
        """Read the arguments; raises ConfigError for one that is unknown or of another kind.

        llm: by default that of Settings. options: PassageOptions.
        """
        chosen = Settings.llm if llm is None else llm
        if not isinstance(chosen, CacheBlendLLM):
            raise ConfigError(f"llm is a {type(chosen).__name__}: give a CacheBlendLLM")
        given = source if isinstance(source, BaseIndex) else checked_nodes(source, "documents")
        return cls(chosen, given, **OPTIONS.read(options))

    def __post_init__(self) -> None:
        """Raise ConfigError for a field of another kind."""
        check_parts("transformations", self.transformations or (), TransformComponent)
        check_parts("node_postprocessors", self.node_postprocessors, BaseNodePostprocessor)
        check_choice("order", self.order, list(PassageOrder))
        count = self.similarity_top_k
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ConfigError(f"similarity_top_k={count!r} must be an integer of at least 1")

    def postprocessors(self) -> list[BaseNodePostprocessor]:
        """Return the postprocessors that were given, and the one that hints."""
        hinting = CacheBlendPostprocessor(llm=self.llm, order=PassageOrder(self.order))
        return [*self.node_postprocessors, hinting]

    def retriever(self, template: BasePromptTemplate | None = None) -> BaseRetriever:
        """Return a retriever over an index whose nodes' KV is stored.

        Unless the LLM has an instruction, or was opened before, the beginning of ``template``
        becomes its instruction: what KV is computed after.
        """
        index = self._index(template)
        return index.as_retriever(similarity_top_k=self.similarity_top_k)

    def _index(self, template: BasePromptTemplate | None) -> BaseIndex[Any]:
        source = self.source
        embed_model = self._embed_model()
        if template is not None and self.llm.instruction is None and not self.llm.is_open:
            self.llm.instruction = self.llm.resolve_instruction(template)
        steps = list(self.transformations or Settings.transformations)
        collection = self.collection
        if collection is None:
            collection = "" if isinstance(source, BaseIndex) else _name_of(steps)
        precompute = CacheBlendPrecompute.from_llm(
            self.llm, collection=collection, show_progress=self.show_progress
        )
        if isinstance(source, BaseIndex):
            precompute(_nodes_of(source))
            return source
        vectors = self.vector_store or SimpleVectorStore()
        store = CacheBlendVectorStore(vectors, self.llm, collection)
        return VectorStoreIndex.from_documents(
            source,
            storage_context=StorageContext.from_defaults(vector_store=store),
            transformations=[*steps, precompute],
            embed_model=embed_model,
            show_progress=self.show_progress,
        )

    def _embed_model(self) -> Any:
        """Return the model that embeds documents: a missing one is missed before work begins."""
        if isinstance(self.source, BaseIndex):
            return None
        return resolve_embed_model(self.embed_model) if self.embed_model else Settings.embed_model


def check_choice(name: str, given: Any, choices: Sequence[str]) -> None:
    """Raise ConfigError unless an argument is one of some words."""
    if given not in choices:
        raise ConfigError(f"{name}={given!r} must be one of {', '.join(choices)}")


def check_parts(name: str, given: Any, kind: type) -> None:
    """Raise ConfigError unless an argument is a list of objects of a kind."""
    if not isinstance(given, list | tuple):
        raise ConfigError(f"{name} is a {type(given).__name__}: give a list of {kind.__name__}s")
    for index, part in enumerate(given):
        if not isinstance(part, kind):
            raise ConfigError(f"{name}[{index}] is a {type(part).__name__}: give {kind.__name__}s")


def _name_of(transformations: Sequence[TransformComponent]) -> str:
    """Return a name for documents that are cut so, the same in every process."""
    settings = remove_unstable_values(str([step.to_dict() for step in transformations]))
    return hashlib.sha256(settings.encode()).hexdigest()[:16]


def _nodes_of(index: BaseIndex[Any]) -> list[BaseNode]:
    """Return an index's nodes, from its document store or, where that is empty, its vectors'."""
    nodes = [node for node in index.docstore.docs.values() if not isinstance(node, Document)]
    if nodes or not isinstance(index, VectorStoreIndex):
        return nodes
    try:
        return list(index.vector_store.get_nodes())
    except NotImplementedError:
        store = type(index.vector_store).__name__
        raise ConfigError(
            f"{store} cannot list its nodes: run CacheBlendPrecompute on them"
        ) from None
