"""cacheblend_retriever_tool: passages for agents, whose KV is reused in the observations."""

from __future__ import annotations

from typing import Any

from llama_index.core.tools import RetrieverTool, ToolMetadata, ToolOutput

from llama_index.llms.cacheblend.indexing import Passages, Source
from llama_index.llms.cacheblend.llm import CacheBlendLLM

NAME = "search"
DESCRIPTION = "Finds the passages that tell most about a question."


def cacheblend_retriever_tool(
    source: Source,
    llm: CacheBlendLLM | None = None,
    *,
    name: str = NAME,
    description: str = DESCRIPTION,
    **options: Any,
) -> RetrieverTool:
    """Return a tool whose results hold passages word for word, so that an agent reuses their KV.

    Args:
        source: documents or an index, as for cacheblend_query_engine.
        llm: the agent's; by default ``Settings.llm``.
        name: by which the model calls the tool.
        description: what the model is told of it: say what the passages are about.
        **options: those of cacheblend_query_engine.

    Raises:
        ConfigError: before a model is loaded, for an argument of another kind.
    """
    passages = Passages.of(source, llm, options)
    return _PassageTool(
        passages.retriever(),
        ToolMetadata(name=name, description=description),
        passages.postprocessors(),
    )


class _PassageTool(RetrieverTool):
    """A retriever tool that searches for what it is asked, without the arguments' names."""

    def call(self, *args: Any, **kwargs: Any) -> ToolOutput:
        return super().call(*args, *kwargs.values())

    async def acall(self, *args: Any, **kwargs: Any) -> ToolOutput:
        return await super().acall(*args, *kwargs.values())
