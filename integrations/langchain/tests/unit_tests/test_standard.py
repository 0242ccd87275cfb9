"""LangChain's own unit tests of chat models, none of them changed.

Of the standard parameters, ``timeout`` and ``max_retries`` would do nothing, and so are refused.
"""

from __future__ import annotations

from typing import Any

from langchain_tests.unit_tests import ChatModelUnitTests
from toy import TOY

from langchain_cacheblend import ChatCacheBlend


class TestChatCacheBlendUnit(ChatModelUnitTests):
    @property
    def chat_model_class(self) -> type[ChatCacheBlend]:
        return ChatCacheBlend

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": TOY}

    @property
    def standard_chat_model_params(self) -> dict[str, Any]:
        return {"temperature": 0, "max_tokens": 100, "stop": [], "api_key": "test"}

    @property
    def init_from_env_params(self) -> tuple[dict[str, str], dict[str, Any], dict[str, Any]]:
        return {"CACHEBLEND_API_KEY": "key"}, {"model": TOY}, {"api_key": "key"}
