"""CacheBlendVectorStore: a vector store whose deletions drop the documents' KV, too."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any, ClassVar

from llama_index.core.bridge.pydantic import Field, SerializeAsAny
from llama_index.core.vector_stores.types import BasePydanticVectorStore
from pydantic import InstanceOf

from cacheblend_rag import CheckedOptions
from llama_index.llms.cacheblend.precompute import document_id
from llama_index.llms.cacheblend.settings import EngineSettings


def _of_wrapped(name: str) -> Any:
    """Return a method that calls the wrapped store's method of this name."""

    def call(self: CacheBlendVectorStore, *args: Any, **kwargs: Any) -> Any:
        """Return what the wrapped store's own method returns."""
        return getattr(self.vector_store, name)(*args, **kwargs)

    return call


class CacheBlendVectorStore(CheckedOptions, BasePydanticVectorStore):
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

    vector_store: SerializeAsAny[InstanceOf[BasePydanticVectorStore]]
    blend: SerializeAsAny[InstanceOf[EngineSettings]] = Field(exclude=True)
    collection: str | None = None

    def __init__(
        self,
        vector_store: BasePydanticVectorStore,
        blend: EngineSettings,
        collection: str | None = None,
    ) -> None:
        super().__init__(
            stores_text=getattr(vector_store, "stores_text", False),
            is_embedding_query=getattr(vector_store, "is_embedding_query", True),
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

    # All else is the wrapped store's.
    add: ClassVar[Any] = _of_wrapped("add")
    async_add: ClassVar[Any] = _of_wrapped("async_add")
    get_nodes: ClassVar[Any] = _of_wrapped("get_nodes")
    aget_nodes: ClassVar[Any] = _of_wrapped("aget_nodes")
    delete_nodes: ClassVar[Any] = _of_wrapped("delete_nodes")
    adelete_nodes: ClassVar[Any] = _of_wrapped("adelete_nodes")
    query: ClassVar[Any] = _of_wrapped("query")
    aquery: ClassVar[Any] = _of_wrapped("aquery")
    persist: ClassVar[Any] = _of_wrapped("persist")

    def _documents(self) -> set[str]:
        with suppress(NotImplementedError):
            return {document_id(node) for node in self.vector_store.get_nodes()}
        return set()
