"""LangChain's own integration tests of chat models, none of them changed, on a pretrained model.

SmolLM2 (135M) was not trained to call tools. What it fails at is named, with what it answered.
"""

from __future__ import annotations

from typing import Any

from langchain_core.messages import AIMessage, AIMessageChunk

from langchain_cacheblend import ChatCacheBlend
from tests.models import smollm2_engine
from tests.standard import ToolsAndForms


class TestSmolLM2(ToolsAndForms):
    @property
    def chat_model_params(self) -> dict[str, Any]:
        """Without penalties a model of this size repeats itself within a string for ever."""
        return {"engine": smollm2_engine(), "repetition_penalty": 1.2, "frequency_penalty": 0.5}

    @property
    def standard_chat_model_params(self) -> dict[str, Any]:
        return {"temperature": 0, "max_tokens": 64, "stop": []}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        llm = ChatCacheBlend(engine=smollm2_engine(), max_tokens=4)
        if not stream:
            return llm.invoke("hello")
        full = AIMessageChunk(content="")
        for chunk in llm.stream("hello"):
            full += chunk
        return full
