"""What LangChain's standard tests of chat models are told of ChatCacheBlend: it can all of it."""

from __future__ import annotations

from typing import Literal

from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_tests.integration_tests import ChatModelIntegrationTests

from langchain_cacheblend import ChatCacheBlend

Detail = Literal[
    "audio_input", "audio_output", "reasoning_output", "cache_read_input", "cache_creation_input"
]


class ToolsAndForms(ChatModelIntegrationTests):
    """All of the suite but images, sound, PDF and another model for one call."""

    known = "hello"
    """A text that is asked about where cached tokens are counted."""

    @property
    def chat_model_class(self) -> type[ChatCacheBlend]:
        return ChatCacheBlend

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supports_anthropic_inputs(self) -> bool:
        return True

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
        llm = ChatCacheBlend(**self.chat_model_params, max_tokens=4)
        if not stream:
            return llm.invoke(self.known)
        full = AIMessageChunk(content="")
        for chunk in llm.stream(self.known):
            full += chunk
        return full
