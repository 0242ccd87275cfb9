"""CacheBlendVectorStore: a vector store whose deletions drop the documents' KV, too."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import fsspec
from llama_index.core.bridge.pydantic import Field, SerializeAsAny
from llama_index.core.schema import BaseNode
from llama_index.core.vector_stores.types import (
    BasePydanticVectorStore,
    MetadataFilters,
    VectorStoreQuery,
    VectorStoreQueryResult,
)

from cacheblend_rag import ConfigError
from llama_index.llms.cacheblend.documents import document_id
from llama_index.llms.cacheblend.settings import EngineSettings


class CacheBlendVectorStore(BasePydanticVectorStore):
    """Wraps any vector store: what is deleted from it is evicted from the engine.

    An index updates and deletes documents through its vector store (``delete_ref_doc``,
    ``update_ref_doc``, ``refresh_ref_docs``), and so does an IngestionPipeline with upserts.

    ``delete_nodes`` leaves KV in place: it goes when the node's document does.

    Args:
        vector_store: keeps the vectors.
        blend: the CacheBlendLLM or CacheBlendPrecompute whose engine keeps the KV.
        collection: only what was cut for it is evicted; None is all.

    Raises:
        ConfigError: when one of them is of another kind.
    """

    vector_store: SerializeAsAny[BasePydanticVectorStore]
    blend: SerializeAsAny[EngineSettings] = Field(exclude=True)
    collection: str | None = None

    def __init__(
        self,
        vector_store: BasePydanticVectorStore,
        blend: EngineSettings,
        collection: str | None = None,
    ) -> None:
        if not isinstance(vector_store, BasePydanticVectorStore):
            raise ConfigError(
                f"vector_store is a {type(vector_store).__name__}: give LlamaIndex's vector store"
            )
        if not isinstance(blend, EngineSettings):
            raise ConfigError(f"blend is a {type(blend).__name__}: give a CacheBlendLLM")
        super().__init__(
            stores_text=vector_store.stores_text,
            is_embedding_query=vector_store.is_embedding_query,
            vector_store=vector_store,
            blend=blend,
            collection=collection,
        )

    @classmethod
    def class_name(cls) -> str:
        return "CacheBlendVectorStore"

    @property
    def client(self) -> Any:
        """The wrapped store's client."""
        return self.vector_store.client

    def delete(self, ref_doc_id: str, **delete_kwargs: Any) -> None:
        """Delete a document's vectors, then its KV."""
        self.vector_store.delete(ref_doc_id, **delete_kwargs)
        self.blend.open().evict_document(ref_doc_id, self.collection)

    async def adelete(self, ref_doc_id: str, **delete_kwargs: Any) -> None:
        await self.vector_store.adelete(ref_doc_id, **delete_kwargs)
        engine = await self.blend.aopen()
        await asyncio.to_thread(engine.evict_document, ref_doc_id, self.collection)

    def clear(self) -> None:
        """Delete all vectors, and the KV of the documents that the store can list."""
        listed = self._documents()
        self.vector_store.clear()
        for name in listed:
            self.blend.open().evict_document(name, self.collection)

    async def aclear(self) -> None:
        await asyncio.to_thread(self.clear)

    def add(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[str]:
        return self.vector_store.add(nodes, **kwargs)

    async def async_add(self, nodes: Sequence[BaseNode], **kwargs: Any) -> list[str]:
        return await self.vector_store.async_add(nodes, **kwargs)

    def get_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None
    ) -> list[BaseNode]:
        return self.vector_store.get_nodes(node_ids, filters)

    async def aget_nodes(
        self, node_ids: list[str] | None = None, filters: MetadataFilters | None = None
    ) -> list[BaseNode]:
        return await self.vector_store.aget_nodes(node_ids, filters)

    def delete_nodes(
        self,
        node_ids: list[str] | None = None,
        filters: MetadataFilters | None = None,
        **delete_kwargs: Any,
    ) -> None:
        self.vector_store.delete_nodes(node_ids, filters, **delete_kwargs)

    async def adelete_nodes(
        self,
        node_ids: list[str] | None = None,
        filters: MetadataFilters | None = None,
        **delete_kwargs: Any,
    ) -> None:
        await self.vector_store.adelete_nodes(node_ids, filters, **delete_kwargs)

    def query(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        return self.vector_store.query(query, **kwargs)

    async def aquery(self, query: VectorStoreQuery, **kwargs: Any) -> VectorStoreQueryResult:
        return await self.vector_store.aquery(query, **kwargs)

    def persist(self, persist_path: str, fs: fsspec.AbstractFileSystem | None = None) -> None:
        """Write the vectors to a file; the engine decides where KV is kept."""
        self.vector_store.persist(persist_path, fs)

    def _documents(self) -> set[str]:
        with suppress(NotImplementedError):
            return {document_id(node) for node in self.vector_store.get_nodes()}
        return set()
