"""SmolLM2 writes valid JSON and calls, and the guide's programs on them run as they stand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from cacheblend_rag import ChatPrompt, SamplingParams, StructuredOutputs, TransformersEngine
from tests.readme import DOCS, blocks

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "subject": {"type": "string", "maxLength": 40},
        "kind": {"enum": ["person", "place", "event", "thing"]},
        "year": {"type": ["integer", "null"], "minimum": 0, "maximum": 2100},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 16}, "maxItems": 3},
    },
    "required": ["subject", "kind", "year", "tags"],
}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search the passages for a text.",
            "parameters": {
                "type": "object",
                "properties": {"query": {"type": "string"}, "count": {"type": "integer"}},
                "required": ["query"],
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Look up when a person was born or died.",
            "parameters": {
                "type": "object",
                "properties": {
                    "person": {"type": "string"},
                    "event": {"enum": ["birth", "death"]},
                    "places": {"type": "array", "items": {"type": "string"}},
                },
                "required": ["person", "event"],
            },
        },
    },
]
PROGRAMS = {"StructuredOutputs(": "'planet': ", "ChatPrompt(": "tokens reused", "logprobs=": "'"}
"""What the programs have in them, and what they print."""


@pytest.fixture(scope="module")
def engine(smollm2_folder: Path) -> Iterator[TransformersEngine]:
    with closing(TransformersEngine("smollm2", dtype="float32")) as opened:
        yield opened


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_json_and_calls_are_valid(engine: TransformersEngine, temperature: float) -> None:
    messages = [{"role": "user", "content": "When was the lighthouse built, and by whom?"}]
    form = StructuredOutputs(json=SCHEMA)
    asked = SamplingParams(max_tokens=96, temperature=temperature, seed=1, structured_outputs=form)
    jsonschema.validate(json.loads(engine.generate(messages, asked).text), SCHEMA)
    asked = SamplingParams(max_tokens=96, temperature=temperature, seed=1)
    for tool in TOOLS:
        name = tool["function"]["name"]
        choice = {"type": "function", "function": {"name": name}}
        [call] = engine.generate(ChatPrompt(messages, TOOLS, choice), asked).tool_calls
        assert call.name == name
        jsonschema.validate(json.loads(call.arguments), tool["function"]["parameters"])


@pytest.mark.parametrize("mark", PROGRAMS)
def test_the_guides_programs_run(
    mark: str, smollm2_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (program,) = [block for block in blocks("python", DOCS / "tools.md") if mark in block]
    names: dict[str, TransformersEngine] = {}
    exec(program, names)  # noqa: S102
    names["engine"].close()
    assert PROGRAMS[mark] in capsys.readouterr().out
