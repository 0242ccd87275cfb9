"""An index whose nodes' KV is stored, made of documents or of an index that there is."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Self

from llama_index.core import Settings, StorageContext, VectorStoreIndex
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.bridge.pydantic import ConfigDict, Field
from llama_index.core.embeddings.utils import resolve_embed_model
from llama_index.core.indices.base import BaseIndex
from llama_index.core.ingestion.pipeline import remove_unstable_values
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.schema import BaseNode, Document, TransformComponent
from llama_index.core.vector_stores import SimpleVectorStore
from llama_index.core.vector_stores.types import BasePydanticVectorStore
from pydantic import InstanceOf

from cacheblend_rag import CheckedOptions, ConfigError, PassageOrder
from llama_index.llms.cacheblend.llm import CacheBlendLLM
from llama_index.llms.cacheblend.precompute import CacheBlendPrecompute
from llama_index.llms.cacheblend.vector_store import CacheBlendVectorStore
from llama_index.postprocessor.cacheblend.postprocessor import CacheBlendPostprocessor

Source = Sequence[Document] | BaseIndex[Any]


class Passages(CheckedOptions):
    """Where an engine or a tool finds its passages: arguments of cacheblend_query_engine."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    llm: InstanceOf[CacheBlendLLM]
    source: InstanceOf[BaseIndex[Any]] | list[InstanceOf[Document]]
    transformations: list[InstanceOf[TransformComponent]] | None = None
    embed_model: Any = None
    vector_store: InstanceOf[BasePydanticVectorStore] | None = None
    similarity_top_k: int = Field(default=4, ge=1)
    node_postprocessors: list[InstanceOf[BaseNodePostprocessor]] = Field(default_factory=list)
    order: PassageOrder = PassageOrder.SCORE
    collection: str | None = None
    show_progress: bool = True

    @classmethod
    def of(cls, source: Source, llm: CacheBlendLLM | None, options: Mapping[str, Any]) -> Self:
        """Read the arguments; raises ConfigError for one that is unknown or of another kind.

        llm: by default that of Settings.
        """
        return cls(source=source, llm=Settings.llm if llm is None else llm, **options)

    def postprocessors(self) -> list[BaseNodePostprocessor]:
        """Return the postprocessors that were given, and the one that hints."""
        return [*self.node_postprocessors, CacheBlendPostprocessor(llm=self.llm, order=self.order)]

    def retriever(self, template: BasePromptTemplate | None = None) -> BaseRetriever:
        """Return a retriever over an index whose nodes' KV is stored.

        Unless the LLM has an instruction, or was opened before, the beginning of ``template``
        becomes its instruction: what KV is computed after.
        """
        index = self._index(template)
        return index.as_retriever(similarity_top_k=self.similarity_top_k)

    def _index(self, template: BasePromptTemplate | None) -> BaseIndex[Any]:
        is_index = isinstance(self.source, BaseIndex)
        # First, since it may be missing.
        embed_model = (
            None if is_index else resolve_embed_model(self.embed_model or Settings.embed_model)
        )
        if template is not None and self.llm.instruction is None and not self.llm.is_open:
            self.llm.instruction = self.llm.resolve_instruction(template)
        steps = list(self.transformations or Settings.transformations)
        collection = self.collection
        if collection is None:
            collection = "" if is_index else _name_of(steps)
        precompute = CacheBlendPrecompute.from_llm(
            self.llm, collection=collection, show_progress=self.show_progress
        )
        if isinstance(self.source, BaseIndex):
            precompute(_nodes_of(self.source))
            return self.source
        vectors = self.vector_store or SimpleVectorStore()
        store = CacheBlendVectorStore(vectors, self.llm, collection)
        return VectorStoreIndex.from_documents(
            self.source,
            storage_context=StorageContext.from_defaults(vector_store=store),
            transformations=[*steps, precompute],
            embed_model=embed_model,
            show_progress=self.show_progress,
        )


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
