"""CacheBlendMiddleware: lets an agent answer from the stored KV of what its tools retrieved.

Needs the extra ``agents``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from langchain_core.documents import Document
from langchain_core.messages import BaseMessage, ToolMessage
from langchain_core.runnables import run_in_executor

from langchain_cacheblend.chat_models import ChatCacheBlend
from langchain_cacheblend.sources import to_hints

try:
    from langchain.agents.middleware import AgentMiddleware, ModelRequest, ModelResponse
except ImportError as error:
    raise ImportError(
        "CacheBlendMiddleware needs an extra: pip install 'langchain-cacheblend[agents]'"
    ) from error


class CacheBlendMiddleware(AgentMiddleware):
    """Has ChatCacheBlend answer once a retrieval tool has returned Documents.

    .. code-block:: python

        agent = create_agent(
            tool_calling_model, tools=[search], middleware=[CacheBlendMiddleware(llm)]
        )

    ChatCacheBlend calls no tools, so the agent's own model decides what to look up. When the last
    messages are what tools returned and hold Documents as their artifact
    (``response_format="content_and_artifact"``), the next call goes to ``llm``, with hints at these
    Documents and without tools: it is the answer. All other calls stay with the agent's own model,
    and so do agents with a ``response_format``. A ChatCacheBlend (or a subclass that calls tools)
    as the agent's own model is given the hints at every call.

    Texts that no index knows are precomputed standing alone: an agent sends what its tools
    returned again in each later turn, and reuses it there.
    """

    def __init__(self, llm: ChatCacheBlend, *, document_key: str | None = None) -> None:
        super().__init__()
        self.llm = llm
        self.document_key = document_key

    def wrap_model_call(
        self,
        request: ModelRequest[Any],
        handler: Callable[[ModelRequest[Any]], ModelResponse[Any]],
    ) -> ModelResponse[Any]:
        """Send the call where it belongs, with hints."""
        return handler(self._routed(request))

    async def awrap_model_call(
        self,
        request: ModelRequest[Any],
        handler: Callable[[ModelRequest[Any]], Awaitable[ModelResponse[Any]]],
    ) -> ModelResponse[Any]:
        """As wrap_model_call; unknown texts are precomputed off the event loop."""
        return await handler(await run_in_executor(None, self._routed, request))

    def _routed(self, request: ModelRequest[Any]) -> ModelRequest[Any]:
        documents = _documents(request.messages)
        if not documents:
            return request
        if isinstance(request.model, ChatCacheBlend):
            return self._hinted(request, request.model, documents)
        if _documents(_last_results(request.messages)) and request.response_format is None:
            answering = request.override(
                model=self.llm, tools=[], tool_choice=None, model_settings={}
            )
            return self._hinted(answering, self.llm, documents)
        return request

    def _hinted(
        self, request: ModelRequest[Any], llm: ChatCacheBlend, documents: Sequence[Document]
    ) -> ModelRequest[Any]:
        hints = to_hints(documents, self.document_key)
        unknown = dict.fromkeys(h.text for h in hints if h.text not in llm.engine.registry)
        if unknown:
            llm.engine.precompute(unknown, progress=False)
        return request.override(model_settings={**request.model_settings, "hints": hints})


def _documents(messages: Sequence[BaseMessage]) -> list[Document]:
    """Return the Documents that tools returned along with their text."""
    return [
        item
        for message in messages
        if isinstance(message, ToolMessage) and isinstance(message.artifact, list | tuple)
        for item in message.artifact
        if isinstance(item, Document)
    ]


def _last_results(messages: Sequence[BaseMessage]) -> list[BaseMessage]:
    """Return the tool messages at the end."""
    found: list[BaseMessage] = []
    for message in reversed(messages):
        if not isinstance(message, ToolMessage):
            break
        found.append(message)
    return found
