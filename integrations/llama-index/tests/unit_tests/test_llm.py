from __future__ import annotations

import json
import os
from typing import Any

import pytest
from llama_index.core.base.llms.types import ChatMessage, ImageBlock, MessageRole
from llama_index.core.callbacks import CallbackManager, LlamaDebugHandler, TokenCountingHandler
from llama_index.core.callbacks.schema import CBEventType
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from toy import TOY

from cacheblend_rag import (
    BlendConfig,
    ConfigError,
    Document,
    Engine,
    ModelLoadError,
    PromptError,
    SamplingParams,
)
from llama_index.llms.cacheblend import (
    CacheBlendLLM,
    CacheBlendPrecompute,
    CacheBlendReportEvent,
)

QUESTION = "Where does Clara Berg live?"
MESSAGES = [
    ChatMessage(role=MessageRole.SYSTEM, content="Be brief."),
    ChatMessage(role=MessageRole.USER, content=QUESTION),
]
PASSAGE = "Clara Berg lives in Paris. " * 40


@pytest.mark.parametrize("method", ["chat", "complete"])
def test_each_way_to_ask_says_what_the_engine_says(
    method: str, ask: Any, llm: CacheBlendLLM, demo_engine: Engine
) -> None:
    asked: Any = MESSAGES if method == "chat" else QUESTION
    plain: Any = QUESTION
    if method == "chat":
        plain = [{"role": one.role.value, "content": one.content} for one in MESSAGES]

    def said(**kwargs: Any) -> str:
        found = ask(llm, method, asked, **kwargs)
        return str(found.message.content if method == "chat" else found.text)

    expected = demo_engine.generate(plain, SamplingParams(max_tokens=6))
    assert said(**({} if method == "chat" else {"formatted": True})) == expected.text
    first, second = said(max_tokens=12, ignore_eos=True).split()[:2]
    assert said(max_tokens=1, ignore_eos=True).strip() == first
    assert second not in said(max_tokens=12, stop=[second], ignore_eos=True)
    with pytest.raises(
        ConfigError, match=r"unknown argument 'tokens_max' of a call \(did you mean 'max_"
    ):
        said(tokens_max=3)


COMPONENTS = [CacheBlendLLM, CacheBlendPrecompute]


def test_options_by_names_of_other_libraries() -> None:
    made = CacheBlendPrecompute(model_name="toy", base_url="http://localhost:1")
    assert (made.model, made.engine) == ("toy", "http://localhost:1")
    llm = CacheBlendLLM(
        model=TOY, max_new_tokens=5, stop_sequences="x", additional_kwargs={"top_p": 0.9}
    )
    assert (llm.max_tokens, llm.stop) == (5, ["x"])
    assert CacheBlendLLM.from_dict(llm.to_dict()).to_dict() == llm.to_dict()
    assert CacheBlendLLM.from_json(llm.to_json()).to_dict() == llm.to_dict()
    assert CacheBlendLLM(**llm.to_dict()).to_dict() == llm.to_dict()
    assert llm.model_copy(update={"max_tokens": 6}).max_tokens == 6


@pytest.mark.parametrize("component", COMPONENTS)
@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"naamespace": "s3cret"}, " (did you mean 'namespace'?)"),
        ({"model_name": "s3cret"}, "model and model_name name one option"),
        (
            {"blend_config": {"selectr": "s3cret"}},
            "unknown setting 'selectr' of a request (did you mean 'selector'?)",
        ),
        ({"engine": CacheBlendLLM(model=TOY)}, "give an open engine, such as llm.open()"),
        ({"model": None}, "model=None: name a model"),
    ],
)
def test_wrong_options_are_refused_in_a_line_before_anything_is_loaded(
    component: Any, options: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        component(**{"model": "no-such-model", **options})
    assert told in str(raised.value)
    assert "\n" not in str(raised.value)
    assert "s3cret" not in str(raised.value)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (
            {"temprature": 1},
            r"unknown option 'temprature' of CacheBlendLLM \(did you mean 'temperature'\?\)",
        ),
        ({"top_p": 0.9}, "unknown option 'top_p' of CacheBlendLLM: give it as additional_kwargs="),
        (
            {"additional_kwargs": {"topp": 0.9}},
            r"unknown argument 'topp' of a call \(did you mean 'top_p",
        ),
        ({"additional_kwargs": {"top_p": 2}}, "top_p=2 must be less than or equal to 1"),
        ({"stop": [""]}, "stop=.* should have at least 1 character"),
    ],
)
def test_wrong_defaults_of_calls_are_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        CacheBlendLLM(model="no-such-model", **options)


def test_metadata_is_the_models(llm: CacheBlendLLM, demo_engine: Engine) -> None:
    metadata = llm.metadata
    assert metadata.context_window == demo_engine.context_window == 4096
    assert metadata.num_output == 6
    assert metadata.is_chat_model
    assert metadata.model_name == demo_engine.model_name
    assert "/" not in metadata.model_name


def test_a_completion_is_a_users_message_or_what_a_function_says_unless_it_is_formatted(
    llm: CacheBlendLLM, demo_engine: Engine
) -> None:
    asked = llm.complete(QUESTION).raw["prompt_tokens"]
    assert asked == llm.chat([ChatMessage(QUESTION)]).raw["prompt_tokens"]
    seen: list[Any] = []

    def from_messages(messages: Any) -> str:
        seen.append(messages)
        return "one two three"

    def from_completion(prompt: str) -> str:
        seen.append(prompt)
        return "one two three four"

    llm = CacheBlendLLM(
        engine=demo_engine,
        max_tokens=1,
        messages_to_prompt=from_messages,
        completion_to_prompt=from_completion,
    )
    tokens = [
        len(demo_engine.tokenize(text)) + 1 for text in ("one two three", "one two three four")
    ]
    assert llm.chat(MESSAGES).raw["prompt_tokens"] == tokens[0]
    assert llm.complete(QUESTION).raw["prompt_tokens"] == tokens[1]
    assert seen == [MESSAGES, QUESTION]
    assert llm.complete("one two three", formatted=True).raw["prompt_tokens"] == tokens[0]
    assert len(seen) == 2


def test_responses_tell_usage_and_report(llm: CacheBlendLLM, demo_engine: Engine) -> None:
    demo_engine.precompute([Document("clara", (PASSAGE,))], progress=False)
    response = llm.complete(f"{PASSAGE}\n\nQuestion: {QUESTION}\nAnswer:", formatted=True)
    report = response.additional_kwargs["cacheblend"]
    usage = response.raw["usage"]
    assert report["chunks"][0]["hit"]
    assert report["chunks"][0]["document_id"] == "clara"
    assert usage["prompt_tokens"] == report["prompt_tokens"]
    assert usage["cached_tokens"] == report["reused_tokens"] >= len(demo_engine.tokenize(PASSAGE))
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert response.raw["cached_tokens"] == usage["cached_tokens"]
    json.dumps(report)


def test_blend_arguments_of_a_call_win(llm: CacheBlendLLM, demo_engine: Engine) -> None:
    demo_engine.precompute([Document("clara", (PASSAGE,))], progress=False)

    def report(**kwargs: Any) -> Any:
        prompt = f"Notes:\n{PASSAGE}\n\n{QUESTION}"
        return llm.complete(prompt, formatted=True, **kwargs).additional_kwargs["cacheblend"]

    assert report()["recompute_ratio"] == 0.0
    assert report(recompute_ratio=0.5)["recompute_ratio"] == 0.5
    given = {"recompute_ratio": 0.25, "selector": "chunk_head", "min_tokens": 0}
    assert report(blend_config=given)["selector"] == "chunk_head"
    assert report(blend_config=BlendConfig(min_tokens=10_000))["blended"] is False


def test_observers_see_every_report(llm: CacheBlendLLM) -> None:
    class Seen(BaseEventHandler):
        events: list[Any] = []  # noqa: RUF012

        def handle(self, event: Any, **kwargs: Any) -> None:
            self.events.append(event)

    handler, root = Seen(), get_dispatcher()
    root.add_event_handler(handler)
    debug, counter = LlamaDebugHandler(print_trace_on_end=False), TokenCountingHandler()
    llm.callback_manager = CallbackManager([debug, counter])
    try:
        llm.complete(QUESTION, formatted=True)
        list(llm.stream_chat(MESSAGES))
    finally:
        root.event_handlers.remove(handler)
    assert len(debug.get_event_pairs(CBEventType.LLM)) == 2
    prompt_tokens = counter.llm_token_counts[0].prompt_token_count
    assert prompt_tokens == len(llm.open().tokenize(QUESTION)) + 1
    reports = [event for event in handler.events if isinstance(event, CacheBlendReportEvent)]
    assert [event.report["engine"] for event in reports] == [llm.open().name] * 2
    names = {event.class_name() for event in handler.events}
    assert {"LLMCompletionStartEvent", "LLMChatEndEvent", "CacheBlendReportEvent"} <= names


def test_messages_that_hold_more_than_text_are_refused(llm: CacheBlendLLM) -> None:
    message = ChatMessage(role=MessageRole.USER, blocks=[ImageBlock(url="http://x.org/a.png")])
    with pytest.raises(PromptError, match=r"messages\[0\] holds a block of type 'image'"):
        llm.chat([message])


def test_an_open_engine_is_never_serialized_and_nothing_is_loaded_too_soon(
    llm: CacheBlendLLM,
) -> None:
    told = llm.to_dict()
    assert told["engine"] == os.environ.get("CACHEBLEND_TEST_ENGINE", "transformers")
    assert told["model"] == llm.open().model_name
    json.dumps(told)
    assert "object at" not in repr(llm)
    missing = CacheBlendLLM(model="no-such-model")
    assert missing.to_payload()["model_name"] == "no-such-model"
    assert not missing.is_open
    with pytest.raises(ModelLoadError) as raised:
        CacheBlendLLM(model="/no/such/model").open()
    assert "\n" not in str(raised.value)
