"""LangChain's own integration tests of chat models, none of them changed, on a pretrained model.

SmolLM2 (135M) was not trained to call tools. What it fails at is named, with what it answered.
"""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel

from tests.models import smollm2_engine
from tests.standard import ToolsAndForms

NO_CALL = (
    "asked for the weather with a tool for it, it answers 'The weather in San Francisco, "
    'California, is typically described by the phrase "San Francisco, CA".\''
)

OTHER_NAME = (
    "asked for the customer 'こんにちは株式会社', it calls with the name "
    "'トラングさら約の勢力を受け', and goes on until max_tokens"
)


class TestSmolLM2(ToolsAndForms):
    @property
    def chat_model_params(self) -> dict[str, Any]:
        """Without penalties a model of this size repeats itself within a string for ever."""
        return {"engine": smollm2_engine(), "repetition_penalty": 1.05, "frequency_penalty": 0.5}

    @property
    def standard_chat_model_params(self) -> dict[str, Any]:
        return {"temperature": 0, "max_tokens": 48, "stop": []}

    @pytest.mark.xfail(strict=True, reason=NO_CALL)
    @pytest.mark.parametrize("model", [{}, {"output_version": "v1"}], indirect=True)
    def test_agent_loop(self, model: BaseChatModel) -> None:
        super().test_agent_loop(model)

    @pytest.mark.xfail(strict=True, reason=OTHER_NAME)
    def test_unicode_tool_call_integration(self, model: BaseChatModel) -> None:
        super().test_unicode_tool_call_integration(model)
