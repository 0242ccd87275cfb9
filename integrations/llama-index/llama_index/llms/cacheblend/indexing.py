"""What an index does: the KV of nodes is computed when they are indexed, and evicted with them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from llama_index.core.bridge.pydantic import Field, SerializeAsAny
from llama_index.core.schema import (
    BaseNode,
    MetadataMode,
    NodeRelationship,
    RelatedNodeInfo,
    TransformComponent,
)
from llama_index.core.vector_stores.types import BasePydanticVectorStore
from pydantic import InstanceOf

from cacheblend_rag import CheckedOptions, Chunk, ConfigError, Document, read_boundary
from llama_index.llms.cacheblend.settings import EngineSettings, checked_llm

logger = logging.getLogger(__name__)
SEPARATOR = "\n\n"


class CacheBlendPrecompute(EngineSettings, TransformComponent):
    """Stores nodes' KV where a CacheBlendLLM with equal settings finds it; returns nodes unchanged.

    Put it after the node parser. What is stored is a node's text with the metadata that LLMs see;
    prompts that show it without them reuse that, too. Sentences of a SentenceWindowNodeParser, of
    which prompts hold whole windows, are stored without. A document's nodes are computed in order,
    each after those before it, as far back as ``metadata["cacheblend_boundary"]`` (who may read a
    node) is the same.
    Nodes of a document replace its earlier nodes in their collection. A node without text is
    skipped; so is one that no tokenizer can encode.

    With ``num_workers`` every worker opens its own engine: give ``kv_path``, which they share.
    An IngestionCache hit skips this step. KV that is missing afterwards is computed with the
    prompt; call the step itself, ``precompute(nodes)``, to store it again.

    Args:
        collection: several indexes over the same documents, cut by different node parsers, each
            need one of their own.
        register_only: nothing is computed, only made known: for a corpus too large to precompute,
            whose chunks a CacheBlendLLM with ``fill_on_miss=True`` computes once they are missed.
        show_progress: whether bars are shown.

    Example:
        ```python
        pipeline = IngestionPipeline(
            transformations=[SentenceSplitter(), CacheBlendPrecompute.from_llm(llm), embed_model]
        )
        ```

    """

    collection: str = Field(
        default="", description="Which of several indexes over the same documents nodes are for."
    )
    register_only: bool = Field(
        default=False, description="Make nodes known, and compute nothing before they are missed."
    )
    show_progress: bool = Field(default=True, description="Show progress bars.", exclude=True)

    @classmethod
    def from_llm(cls, llm: EngineSettings, **fields: Any) -> CacheBlendPrecompute:
        """Return a step that shares ``llm``'s engine, which outlives it.

        Args:
            llm: the CacheBlendLLM that will answer.
            **fields: collection, register_only, show_progress.

        Raises:
            ConfigError: for what ``llm`` settled.
        """
        settled = cls._read(fields).keys() & checked_llm(llm).settings().keys()
        if settled:
            raise ConfigError(f"{', '.join(sorted(settled))}: fixed by the llm: leave it out")
        step = cls(**{**llm.settings(), **fields})
        step._source = llm._source
        return step

    @classmethod
    def class_name(cls) -> str:
        return "CacheBlendPrecompute"

    def __getstate__(self) -> dict[Any, Any]:
        """Refuse to be sent to a worker without a shared folder, whose KV would be lost."""
        state = super().__getstate__()
        if self.store.kv_path is None and "://" not in self.engine:
            raise ConfigError("kv_path=None: workers share KV through a folder, so name one")
        return state

    def __call__(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        """Compute and store the nodes' KV; returns the nodes as they are."""
        given = _Given(nodes=nodes).nodes
        engine = self.open()
        known: list[Document | Chunk] = []
        wanted: list[Document | Chunk] = []
        for source in source_documents(given):
            shown, bare = self._document(source, shown_text), self._document(source, bare_text)
            if any(map(has_window, source.nodes)):
                # With its metadata a sentence stands in no window, except as the first: left out.
                wanted += _items(source, replace(bare, separator=" "))
                continue
            wanted += _items(source, shown)
            if bare != shown:
                known += _items(source, bare)
        report = engine.precompute(
            wanted, progress=self.show_progress, register_only=self.register_only
        )
        for reason, count in report.refused.items():
            logger.warning("%d chunks were not precomputed: %s", count, reason)
        engine.register(known)
        return nodes

    async def acall(self, nodes: Sequence[BaseNode], **kwargs: Any) -> Sequence[BaseNode]:
        """As a call, off the event loop."""
        return await asyncio.to_thread(self, nodes, **kwargs)

    def _document(self, source: SourceDocument, read: Callable[[BaseNode], str]) -> Document:
        texts = [(node, text) for node in source.nodes if _is_encodable(text := read(node), node)]
        return Document(
            source.document_id,
            tuple(text for _, text in texts),
            SEPARATOR,
            self.collection,
            tuple(read_boundary(node.metadata) for node, _ in texts),
        )


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


# Nodes as documents of chunks


class _Given(CheckedOptions):
    nodes: Sequence[InstanceOf[BaseNode]]


def _items(source: SourceDocument, document: Document) -> list[Document | Chunk]:
    """Return a document, which replaces what is known of it, or, of a part, its chunks."""
    return [document] if source.whole else list(document.to_chunks())


def _is_encodable(text: str, node: BaseNode) -> bool:
    """Whether a tokenizer can read a node's text; warn of one that is empty or half a character."""
    try:
        if text.encode("utf-8"):
            return True
        logger.warning("node %s holds no text: it was not precomputed", node.node_id)
    except UnicodeEncodeError:
        logger.warning("node %s holds an unpaired surrogate: skipped", node.node_id)
    return False


@dataclass(frozen=True)
class SourceDocument:
    """Nodes cut from one document, in order; whole: no neighbour of theirs is missing."""

    document_id: str
    nodes: Sequence[BaseNode]
    whole: bool


def shown_text(node: BaseNode) -> str:
    """Return the node's text with the metadata LLMs see, as synthesizers put it into prompts."""
    return node.get_content(metadata_mode=MetadataMode.LLM).strip()


def bare_text(node: BaseNode) -> str:
    """Return the node's text without metadata, as citations and chat templates show it."""
    return node.get_content(metadata_mode=MetadataMode.NONE).strip()


def has_window(node: BaseNode) -> bool:
    """Whether metadata that LLMs do not see hold the node's text within a longer one.

    SentenceWindowNodeParser makes such nodes, and MetadataReplacementPostProcessor shows the longer
    text in place of the node's own: the sentences in it stand there bare.
    """
    text = bare_text(node)
    return bool(text) and any(text in one and one != text for one in _hidden_texts(node))


def shows_window(node: BaseNode) -> bool:
    """Whether the node's own text was replaced by one in metadata that LLMs do not see."""
    return bare_text(node) in _hidden_texts(node)


def _hidden_texts(node: BaseNode) -> list[str]:
    hidden = (node.metadata.get(key) for key in node.excluded_llm_metadata_keys)
    return [value.strip() for value in hidden if isinstance(value, str)]


def document_id(node: BaseNode) -> str:
    """Return the id of the document the node was cut from; its own when it stands alone."""
    return node.ref_doc_id or node.node_id


def source_documents(nodes: Iterable[BaseNode]) -> list[SourceDocument]:
    """Group nodes by source document; documents keep the order of their first nodes.

    Nodes are in the order of their characters where all have a place, and else as they are given.
    """
    groups: dict[str, dict[str, BaseNode]] = {}
    for node in nodes:
        groups.setdefault(document_id(node), {})[node.node_id] = node
    found = []
    for name, group in groups.items():
        placed = [
            (start, node) for node in group.values() if (start := start_index(node)) is not None
        ]
        ordered = list(group.values())
        if len(placed) == len(group):
            ordered = [node for _, node in sorted(placed, key=lambda one: one[0])]
        is_whole = all(name in group for node in ordered for name in _neighbours(node))
        found.append(SourceDocument(name, ordered, is_whole))
    return found


def start_index(node: BaseNode) -> int | None:
    """Return where the node's text starts in its document, if it is known."""
    start = getattr(node, "start_char_idx", None)
    return start if isinstance(start, int) else None


def _neighbours(node: BaseNode) -> list[str]:
    beside = (NodeRelationship.PREVIOUS, NodeRelationship.NEXT)
    related = [node.relationships.get(relationship) for relationship in beside]
    return [one.node_id for one in related if isinstance(one, RelatedNodeInfo)]
