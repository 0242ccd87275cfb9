"""CacheBlendPrecompute: an ingestion step that computes and stores the KV of nodes' texts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from llama_index.core.bridge.pydantic import Field
from llama_index.core.schema import BaseNode, TransformComponent
from pydantic import InstanceOf

from cacheblend_rag import CheckedOptions, Chunk, ConfigError, Document, read_boundary
from llama_index.llms.cacheblend.documents import (
    SEPARATOR,
    SourceDocument,
    bare_text,
    has_window,
    shown_text,
    source_documents,
)
from llama_index.llms.cacheblend.settings import EngineSettings, checked_llm

logger = logging.getLogger(__name__)


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
