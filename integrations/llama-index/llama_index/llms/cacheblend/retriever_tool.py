"""cacheblend_retriever_tool: passages for agents, whose KV is reused in the observations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llama_index.core.embeddings.utils import EmbedType
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import TransformComponent
from llama_index.core.tools import RetrieverTool, ToolMetadata, ToolOutput
from llama_index.core.vector_stores.types import BasePydanticVectorStore

from cacheblend_rag import PassageOrder
from llama_index.llms.cacheblend.indexing import (
    Indexing,
    Retrieving,
    Source,
    blending_llm,
    checked_source,
)
from llama_index.llms.cacheblend.llm import CacheBlendLLM
from llama_index.llms.cacheblend.precompute import Variant

NAME = "search"
DESCRIPTION = "Finds the passages that tell most about a question."


def cacheblend_retriever_tool(
    source: Source,
    llm: CacheBlendLLM | None = None,
    *,
    name: str = NAME,
    description: str = DESCRIPTION,
    transformations: Sequence[TransformComponent] | None = None,
    embed_model: EmbedType | None = None,
    vector_store: BasePydanticVectorStore | None = None,
    similarity_top_k: int = 4,
    node_postprocessors: Sequence[BaseNodePostprocessor] = (),
    order: PassageOrder | str = PassageOrder.SCORE,
    variants: tuple[Variant, ...] | None = None,
    collection: str | None = None,
    show_progress: bool = True,
) -> RetrieverTool:
    """Return a tool whose results hold passages word for word, so that an agent reuses their KV.

    Args:
        source: documents or an index, as for cacheblend_query_engine.
        llm: the agent's; by default ``Settings.llm``.
        name: by which the model calls the tool.
        description: what the model is told of it: say what the passages are about.
        transformations: as for cacheblend_query_engine, and so are the arguments below.
        embed_model: as there.
        vector_store: as there.
        similarity_top_k: how many passages a call returns.
        node_postprocessors: as there.
        order: as there.
        variants: as there.
        collection: as there.
        show_progress: as there.

    Raises:
        ConfigError: before a model is loaded, for an argument of another kind.
    """
    llm = blending_llm(llm)
    source = checked_source(source)
    retrieving = Retrieving(llm, similarity_top_k, node_postprocessors, order)
    indexing = Indexing(
        llm, transformations, embed_model, vector_store, variants, collection, show_progress
    )
    index = indexing.index(source)
    return _PassageTool(
        retrieving.retriever(index),
        ToolMetadata(name=name, description=description),
        retrieving.postprocessors(),
    )


class _PassageTool(RetrieverTool):
    """A retriever tool that searches for what it is asked, without the arguments' names."""

    def call(self, *args: Any, **kwargs: Any) -> ToolOutput:
        return super().call(*args, *kwargs.values())

    async def acall(self, *args: Any, **kwargs: Any) -> ToolOutput:
        return await super().acall(*args, *kwargs.values())
