"""Objects of pydantic classes as answers: by decoding that their schemas constrain."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest
from llama_index.core import ChatPromptTemplate, PromptTemplate
from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.bridge.pydantic import BaseModel, Field, ValidationError, field_validator
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler

from cacheblend_rag import ConfigError, Generation, StructuredOutputs


class Fact(BaseModel):
    """A name and what is said of it."""

    name: str
    years: list[int] = Field(description="When it was so.")

    @field_validator("name")
    @classmethod
    def _not_empty(cls, name: str) -> str:
        if not name:
            raise ValueError("a name is missing")
        return name


PROMPT = PromptTemplate("Notes: {notes}\nFind a fact.")
TEXT = '{"name":"Berta","years":[1950,1960]}'
PREDICT = ("structured_predict", Fact, PROMPT)
FACT = Fact(name="Berta", years=[1950, 1960])
SCHEMA = json.dumps(Fact.model_json_schema(), ensure_ascii=False)


def test_a_prediction_is_held_to_the_schema(ask: Any, acting: Any) -> None:
    llm, script = acting(TEXT, system_prompt="Be exact.")
    assert ask(llm, *PREDICT, llm_kwargs={"max_tokens": 40}, notes="Berta.") == FACT
    (asked,) = script.asked
    assert asked.sampling.structured_outputs == StructuredOutputs(json=Fact.model_json_schema())
    assert asked.sampling.max_tokens == 40
    system, user = asked.prompt
    assert system == {"role": "system", "content": "Be exact."}
    assert user["content"].startswith("Notes: Berta.\nFind a fact.\n\n")
    assert user["content"].endswith(SCHEMA)


def test_a_completion_model_predicts_too(ask: Any, acting: Any) -> None:
    llm, script = acting(TEXT, is_chat_model=False, system_prompt="Be exact.")
    assert ask(llm, *PREDICT, notes="Berta.") == FACT
    (asked,) = script.asked
    assert asked.sampling.structured_outputs is not None
    assert asked.prompt.startswith("Be exact.\n\nNotes: Berta.\nFind a fact.\n\n")
    assert SCHEMA in asked.prompt


def test_the_schema_follows_what_the_user_said_last(acting: Any) -> None:
    llm, script = acting(TEXT, TEXT)
    messages = [ChatMessage("Notes: {notes}"), ChatMessage("Noted.", role=MessageRole.ASSISTANT)]
    llm.structured_predict(Fact, ChatPromptTemplate(messages), notes="Berta.")
    asking = ChatPromptTemplate([*messages, ChatMessage("Find a fact.")])
    llm.structured_predict(Fact, asking, notes="Berta.")
    first, second = (asked.prompt for asked in script.asked)
    assert [message["role"] for message in first] == ["user", "assistant", "user"]
    assert first[2]["content"].endswith(SCHEMA)
    assert second[2]["content"].startswith("Find a fact.\n\nAnswer")


def test_streams_show_the_object_grow(acting: Any) -> None:
    llm, _ = acting(TEXT)
    steps = list(llm.stream_structured_predict(Fact, PROMPT, notes="Berta."))
    assert isinstance(steps[-1], Fact)
    named = [getattr(step, "name", None) for step in steps]
    assert any(name and name != "Berta" and "Berta".startswith(name) for name in named)


def test_an_answer_that_is_cut_or_refused_is_an_error(ask: Any, acting: Any) -> None:
    def cut(generation: Generation) -> Generation:
        return replace(generation, text=TEXT[:14], content=TEXT[:14], finish_reason="length")

    llm, _ = acting(cut, '{"name":"","years":[]}')
    with pytest.raises(ConfigError, match="max_tokens ended the JSON of Fact after 14 characters"):
        ask(llm, *PREDICT, notes="Berta.")
    with pytest.raises(ValidationError, match="a name is missing"):
        ask(llm, *PREDICT, notes="Berta.")


def test_a_structured_llm(acting: Any) -> None:
    llm, script = acting(*[TEXT] * 4)
    structured = llm.as_structured_llm(Fact)
    asked = [ChatMessage("Find a fact.")]

    async def both() -> tuple[Any, Any]:
        steps = [step async for step in await structured.astream_chat(asked)]
        return (await structured.achat(asked)).raw, steps[-1].raw

    assert structured.chat(asked).raw == FACT
    assert structured.complete("Find a fact.").raw == FACT
    assert asyncio.run(both()) == (FACT, FACT)
    assert all(one.sampling.structured_outputs for one in script.asked)


def test_observers_see_a_prediction(acting: Any) -> None:
    class Seen(BaseEventHandler):
        events: list[Any] = []  # noqa: RUF012

        def handle(self, event: Any, **kwargs: Any) -> None:
            self.events.append(event)

    llm, _ = acting(TEXT)
    handler, root = Seen(), get_dispatcher()
    root.add_event_handler(handler)
    try:
        llm.structured_predict(Fact, PROMPT, notes="Berta.")
    finally:
        root.event_handlers.remove(handler)
    names = [event.class_name() for event in handler.events]
    assert [names.count(f"LLMStructuredPredict{end}Event") for end in ("Start", "End")] == [1, 1]
    (start,) = (event for event in handler.events if event.class_name() == "LLMChatStartEvent")
    json.dumps(start.additional_kwargs)
