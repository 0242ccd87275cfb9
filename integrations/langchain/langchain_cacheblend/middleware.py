"""CacheBlendMiddleware: lets an agent answer from the stored KV of what its tools retrieved.

Needs the extra ``agents``.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from itertools import takewhile
from typing import Any, cast

from cacheblend_rag import Chunk, ConfigError
from langchain_core.documents import Document
from langchain_core.messages import BaseMessage, ToolMessage
from langchain_core.runnables import run_in_executor

from langchain_cacheblend.chat_models import ChatCacheBlend
from langchain_cacheblend.documents import to_hints

try:
    from langchain.agents.middleware import AgentMiddleware, ModelRequest, ModelResponse
except ImportError as error:
    raise ImportError(
        "CacheBlendMiddleware needs an extra: pip install 'langchain-cacheblend[agents]'"
    ) from error

logger = logging.getLogger(__name__)


class CacheBlendMiddleware(AgentMiddleware):
    """Has ChatCacheBlend answer from the stored KV of the passages that tools return.

    .. code-block:: python

        agent = create_agent(llm, tools=[search], middleware=[CacheBlendMiddleware(llm)])

    A ChatCacheBlend as the agent's own model is given hints at each call. If another model calls
    the tools, the call after a tool returned passages goes to ``llm``, with hints and without
    tools: it is the answer. All other calls stay with the agent's own model, and so do agents with
    a ``response_format``.

    A tool returns passages as Documents in its artifact (``response_format=
    "content_and_artifact"``), or as a text at least half of which is passages that are known. Of
    Documents, texts that no index knows are precomputed standing alone: an agent sends what its
    tools returned again in each later turn, and reuses it there. If another model calls the tools,
    one that returns neither is named in a warning, once.
    """

    def __init__(self, llm: ChatCacheBlend) -> None:
        super().__init__()
        if not isinstance(llm, ChatCacheBlend):
            raise ConfigError(f"llm is a {type(llm).__name__}: give a ChatCacheBlend")
        self.llm = llm
        self._warned = False

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
        if isinstance(request.model, ChatCacheBlend):
            return self._hinted(request, request.model)
        results = _last_results(request.messages)
        if not results or request.response_format is not None:
            return request
        if not self._passages(results, self.llm):
            self._warn_once(request.messages, results)
            return request
        answering = request.override(model=self.llm, tools=[], tool_choice=None, model_settings={})
        return self._hinted(answering, self.llm)

    def _hinted(self, request: ModelRequest[Any], llm: ChatCacheBlend) -> ModelRequest[Any]:
        hints = self._passages(request.messages, llm)
        if not hints:
            return request
        unknown = dict.fromkeys(h.text for h in hints if h.text not in llm.engine.registry)
        if unknown:
            llm.engine.precompute(unknown, progress=False)
        return request.override(model_settings={**request.model_settings, "hints": hints})

    def _passages(self, messages: Sequence[BaseMessage], llm: ChatCacheBlend) -> list[Chunk]:
        """Return what tools returned: the Documents beside a text, or the known chunks in it."""
        return [
            chunk
            for message in messages
            if isinstance(message, ToolMessage)
            for chunk in to_hints(_documents(message)) or _known_chunks(message.text, llm)
        ]

    def _warn_once(self, messages: Sequence[BaseMessage], results: Sequence[ToolMessage]) -> None:
        """Name a tool whose text holds no passage, unless another one returns Documents."""
        silent = next((result for result in results if result.status != "error"), None)
        if self._warned or silent is None or any(map(_documents, messages)):
            return
        self._warned = True
        logger.warning(
            "tool %r returned no Documents and no passage that is known, so the agent's own model "
            "goes on: give it response_format='content_and_artifact', or precompute its passages "
            "with CacheBlendTransformer",
            silent.name,
        )


def _documents(message: BaseMessage) -> list[Document]:
    """Return the Documents that a tool returned along with its text."""
    artifact = message.artifact if isinstance(message, ToolMessage) else None
    found = artifact if isinstance(artifact, list | tuple) else ()
    return [item for item in found if isinstance(item, Document)]


def _known_chunks(text: str, llm: ChatCacheBlend) -> list[Chunk]:
    """Return the known chunks in a text; none where they are less than half of it."""
    found = llm.engine.registry.find(text)
    covered = sum(match.end - match.start for match in found)
    return [match.chunk for match in found] if 2 * covered >= len(text) else []


def _last_results(messages: Sequence[BaseMessage]) -> list[ToolMessage]:
    """Return the tool messages at the end."""
    results = takewhile(lambda message: isinstance(message, ToolMessage), reversed(messages))
    return cast("list[ToolMessage]", list(results))
