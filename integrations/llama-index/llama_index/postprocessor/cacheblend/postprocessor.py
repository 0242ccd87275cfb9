"""CacheBlendPostprocessor: tells the LLM which chunks come, loads their KV, and orders them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llama_index.core.bridge.pydantic import Field, SerializeAsAny, field_validator
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import BaseNode, NodeWithScore, QueryBundle

from cacheblend_rag import Chunk, Engine, PassageOrder
from llama_index.llms.cacheblend.context import Hint, expect
from llama_index.llms.cacheblend.indexing import (
    bare_text,
    document_id,
    shown_text,
    shows_window,
    start_index,
)
from llama_index.llms.cacheblend.llm import CacheBlendLLM
from llama_index.llms.cacheblend.settings import CheckedComponent, EngineSettings, checked_llm


class CacheBlendPostprocessor(CheckedComponent, BaseNodePostprocessor):
    """Put it last: what leaves it is what prompts will hold.

    Args:
        llm: the CacheBlendLLM that will answer.
        order: ``score`` (best first), ``reverse`` (best last, next to the question) or ``document``
            (nodes of one document together and in its order, the document with the best node
            first).
    """

    llm: SerializeAsAny[EngineSettings] = Field(description="The CacheBlendLLM that answers.")
    order: PassageOrder = Field(
        default=PassageOrder.SCORE, description="'score', 'document' or 'reverse'."
    )

    @field_validator("llm", mode="before")
    @classmethod
    def _read_llm(cls, given: Any) -> Any:
        """Take the LLM itself, or what ``to_dict`` made of it."""
        return CacheBlendLLM.from_dict(given) if isinstance(given, dict) else checked_llm(given)

    @classmethod
    def class_name(cls) -> str:
        return "CacheBlendPostprocessor"

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        engine = self.llm.open()
        ordered = self.order.arrange(
            sorted(nodes, key=lambda node: -(node.score or 0.0)),
            document_of=lambda node: document_id(node.node),
            positions_of=lambda found: _positions([node.node for node in found]),
        )
        hints = [hint for node in ordered for hint in _hints(node.node, engine)]
        expect(hints)
        engine.prefetch([hint[0] for hint in hints if hint[0].text in engine.registry])
        return ordered

    async def _apostprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        """Run in the query's own task, not in a thread: its hints are this task's."""
        await self.llm.aopen()
        return self._postprocess_nodes(nodes, query_bundle)


def _positions(nodes: Sequence[BaseNode]) -> Sequence[int]:
    """Return where one document's nodes start in it; as they come, where one has no place."""
    told = [place for node in nodes if (place := start_index(node)) is not None]
    return told if len(told) == len(nodes) else range(len(nodes))


def _hints(node: BaseNode, engine: Engine) -> list[Hint]:
    """Return what to expect of a node: itself, or the known chunks in a window that it shows."""
    name, texts = document_id(node), (shown_text(node), bare_text(node))
    if shows_window(node) and not any(text in engine.registry for text in texts):
        parts = (match.chunk for match in engine.registry.find(texts[0], [name]))
        return [(part,) for part in parts if part.document_id == name]
    return [tuple(_known(text, name, engine) for text in texts)] if texts[0] else []


def _known(text: str, name: str, engine: Engine) -> Chunk:
    """Return the chunk the engine knows by this text and document, or one it does not know.

    The latest, since the boundaries of older ones may not hold any more.
    """
    variants = reversed(engine.registry.variants(text))
    return next((chunk for chunk in variants if chunk.document_id == name), Chunk(text, name))
