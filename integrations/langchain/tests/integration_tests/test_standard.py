"""LangChain's own integration tests of chat models, none of them changed, on a real engine.

Answers are scripted.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from cacheblend_rag import Engine

from tests.models import toy_engine
from tests.scripted import Asked, Call, scripted
from tests.standard import ToolsAndForms

PASSAGE = "The quiet river stands near the old bridge. " * 12
ARGUMENTS: dict[str, dict[str, Any]] = {
    "magic_function": {"input": 3},
    "magic_function_no_args": {},
    "greeting_generator": {"answer_style": "Pirate"},
    "get_weather": {"location": "San Francisco, CA"},
    "my_adder_tool": {"a": 3, "b": 4},
    "color_picker": {"fav_color": "purple"},
}
JOKE = '{"setup":"Why do cats purr?","punchline":"They are pleased."}'


def script(asked: Asked) -> str | Call:
    """Call the first tool where a user asked or a call is forced; tell jokes as JSON."""
    if asked.tools and (asked.forced or asked.role == "user"):
        name = asked.tools[0]
        if name == "unicode_customer":
            (customer,) = re.findall("'(.+)'", asked.text)
            return name, {"customer_name": customer, "description": "a company"}
        return name, ARGUMENTS[name]
    return JOKE if "joke about cats" in asked.text else "The river is quiet."


@cache
def engine() -> Engine:
    found = scripted(toy_engine(), script)
    found.precompute([PASSAGE], progress=False)
    return found


class TestChatCacheBlendIntegration(ToolsAndForms):
    known = PASSAGE

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"engine": engine()}

    @property
    def standard_chat_model_params(self) -> dict[str, Any]:
        return {"temperature": 0, "max_tokens": 256, "stop": []}
