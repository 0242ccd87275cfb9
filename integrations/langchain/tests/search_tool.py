"""A retriever tool that always finds the same passages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from langchain_core.documents import Document
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import BaseTool, create_retriever_tool


def search_tool(
    documents: Sequence[Document],
    response_format: Literal["content", "content_and_artifact"] = "content_and_artifact",
) -> BaseTool:
    return create_retriever_tool(
        RunnableLambda(lambda _: list(documents)),
        "search",
        "Look passages up.",
        response_format=response_format,
    )
