"""LangChain's own integration tests of chat models, none of them changed, on a real engine.

The weights are random and never end an answer, so that every answer holds text.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

from cacheblend_rag import Engine
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_tests.integration_tests import ChatModelIntegrationTests

from langchain_cacheblend import ChatCacheBlend
from tests.models import random_engine

PASSAGE = "The quiet river stands near the old bridge. " * 12
Detail = Literal[
    "audio_input", "audio_output", "reasoning_output", "cache_read_input", "cache_creation_input"
]


@cache
def engine() -> Engine:
    found = random_engine()
    found.precompute([PASSAGE], progress=False)
    return found


class TestChatCacheBlendIntegration(ChatModelIntegrationTests):
    @property
    def has_tool_calling(self) -> bool:
        return False

    @property
    def has_structured_output(self) -> bool:
        return False

    @property
    def chat_model_class(self) -> type[ChatCacheBlend]:
        return ChatCacheBlend

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"engine": engine(), "max_tokens": 12}

    @property
    def standard_chat_model_params(self) -> dict[str, Any]:
        return {"temperature": 0, "max_tokens": 12, "stop": []}

    @property
    def supports_model_override(self) -> bool:
        """An engine holds one model."""
        return False

    @property
    def supported_usage_metadata_details(
        self,
    ) -> dict[Literal["invoke", "stream"], list[Detail]]:
        return {"invoke": ["cache_read_input"], "stream": ["cache_read_input"]}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        llm = ChatCacheBlend(engine=engine(), max_tokens=4)
        if not stream:
            return llm.invoke(PASSAGE)
        full = AIMessageChunk(content="")
        for chunk in llm.stream(PASSAGE):
            full += chunk
        return full
