"""Chats, as an unmodified OpenAI client reads them."""

from __future__ import annotations

import json

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from cacheblend_rag import ToolCall

pytestmark = pytest.mark.asyncio
ASKED = {"model": "model", "messages": [{"role": "user", "content": "w3 w4"}]}
TASK = [{"role": "user", "content": "### Task:\nw3\n<chat_history>\nw4\n</chat_history>"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]
CALLS = (ToolCall("call_1", "weather", '{"city":"Paris"}'), ToolCall("call_2", "weather", "{}"))


async def streamed(client, **more):
    stream = await client.chat.completions.create(**ASKED, stream=True, **more)
    return [chunk async for chunk in stream]


async def test_an_answer_is_one_of_the_api(http, script):
    answer = await http.post("/v1/chat/completions", json=ASKED)
    told = ChatCompletion.model_validate(answer.json(), strict=True)
    assert told.choices[0].message.content == "Hello, wörld"
    assert told.choices[0].message.role == "assistant"
    assert (told.choices[0].finish_reason, told.model, told.object) == (
        "stop",
        "model",
        "chat.completion",
    )
    assert (told.usage.prompt_tokens, told.usage.completion_tokens) == (4, 3)
    assert told.usage.prompt_tokens_details.cached_tokens == 0
    assert answer.json()["cacheblend"]["report"]["prompt_tokens"] == 4
    assert "sources" not in answer.json()["cacheblend"]


async def test_a_stream_is_the_answer_in_pieces(client, http):
    chunks = await streamed(client)
    assert [chunk.choices[0].delta.content for chunk in chunks[:-1]] == ["", "Hello", ", ", "wörld"]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert chunks[-1].cacheblend["report"]["engine"] == "toy"
    assert all(chunk.usage is None for chunk in chunks)
    raw = (await http.post("/v1/chat/completions", json={**ASKED, "stream": True})).text
    *events, done, rest = raw.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    for event in events:
        ChatCompletionChunk.model_validate_json(event.removeprefix("data: "), strict=True)


async def test_several_answers_have_their_index_and_their_seed(client, script):
    answer = await client.chat.completions.create(**ASKED, n=3, seed=7, temperature=1.0)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert sorted(sampling.seed for sampling in script.sampled) == [7, 8, 9]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, 9)
    chunks = await streamed(client, n=2)
    for index in (0, 1):
        own = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert "".join(one.delta.content or "" for one in own) == "Hello, wörld"
        assert own[-1].finish_reason == "stop"


async def test_logprobs_are_told_for_each_token(client):
    answer = await client.chat.completions.create(**ASKED, logprobs=True, top_logprobs=2)
    told = answer.choices[0].logprobs.content
    assert [one.token for one in told] == ["Hello", ", ", "wörld"]
    assert bytes(told[2].bytes).decode() == "wörld"
    assert [one.logprob for one in told[0].top_logprobs] == [-1.0, -2.0]
    chunks = await streamed(client, logprobs=True)
    lines = [chunk.choices[0].logprobs for chunk in chunks]
    assert [one.token for line in lines if line for one in line.content] == ["Hello", ", ", "wörld"]
    assert (await client.chat.completions.create(**ASKED)).choices[0].logprobs is None


async def test_calls_of_tools_are_told(client, script):
    script.pieces, script.calls = (), CALLS
    answer = await client.chat.completions.create(**ASKED, tools=TOOLS)
    (choice,) = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert [call.id for call in choice.message.tool_calls] == ["call_1", "call_2"]
    assert json.loads(choice.message.tool_calls[0].function.arguments) == {"city": "Paris"}
    assert script.prompts[-1].source.parallel_tool_calls
    await client.chat.completions.create(**ASKED, tools=TOOLS, parallel_tool_calls=False)
    assert not script.prompts[-1].source.parallel_tool_calls
    script.reason = "length"
    cut = await client.chat.completions.create(**ASKED, tools=TOOLS)
    assert cut.choices[0].finish_reason == "length"


async def test_a_stream_tells_calls_of_tools(client, script):
    script.pieces, script.calls = ("Let me see.",), CALLS
    text, calls = "", {}
    async for chunk in await client.chat.completions.create(**ASKED, tools=TOOLS, stream=True):
        delta = chunk.choices[0].delta
        text += delta.content or ""
        calls |= {call.index: call.function.arguments for call in delta.tool_calls or ()}
    assert chunk.choices[0].finish_reason == "tool_calls"
    assert (text, calls) == ("Let me see.", {0: '{"city":"Paris"}', 1: "{}"})
    streaming = client.chat.completions.stream(**ASKED, tools=TOOLS)
    async with streaming as stream:
        final = await stream.get_final_completion()
    assert [call.function.name for call in final.choices[0].message.tool_calls] == ["weather"] * 2


async def test_the_prompt_has_the_tools_and_the_results_of_calls(client, script):
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    messages = [
        {"role": "developer", "content": "w7"},
        {"role": "user", "content": [{"type": "text", "text": "w3"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "w8"},
        {"role": "user", "content": ["w4", {"type": "text", "text": "w5"}]},
        {"role": "assistant", "function_call": call["function"]},
        {"role": "function", "name": "weather", "content": "w9"},
    ]
    choice = {"type": "function", "function": {"name": "weather"}}
    await client.chat.completions.create(
        model="model", messages=messages, tools=TOOLS, tool_choice=choice
    )
    source = script.prompts[-1].source
    roles = [one["role"] for one in source.messages]
    assert roles == ["system", *("user", "assistant", "tool") * 2]
    assert source.messages[2]["tool_calls"] == [call]
    assert source.messages[3]["tool_call_id"] == "call_1"
    assert source.messages[5]["tool_calls"][0]["function"] == call["function"]
    text = script.prompts[-1].text
    assert text.index("w8") < text.index("w4\nw5") < text.index("w9")
    assert (list(source.tools), source.tool_choice) == (TOOLS, choice)


@pytest.mark.parametrize(
    ("asked", "sampled"),
    [
        ({"max_tokens": 5}, {"max_tokens": 5}),
        ({"max_completion_tokens": 6, "max_tokens": 5}, {"max_tokens": 6}),
        ({"temperature": 0.5, "top_p": 0.25}, {"temperature": 0.5, "top_p": 0.25}),
        ({"temperature": 1}, {"temperature": 1}),
        ({"stop": "w9"}, {"stop": ("w9",)}),
        ({"stop": ["w9", "w8"]}, {"stop": ("w9", "w8")}),
        ({"presence_penalty": 1.5}, {"presence_penalty": 1.5}),
        ({"frequency_penalty": -1}, {"frequency_penalty": -1}),
        ({"extra_body": {"top_k": 7, "min_p": 0.5}}, {"top_k": 7, "min_p": 0.5}),
        ({"extra_body": {"top_k": -1}}, {"top_k": 0}),
        ({"extra_body": {"repetition_penalty": 1.5}}, {"repetition_penalty": 1.5}),
        ({"extra_body": {"unknown_field": 1}}, {}),
        ({"logit_bias": {}, "extra_body": {"best_of": 1, "min_tokens": 0}}, {}),
        ({"extra_body": {"prompt_logprobs": None}}, {}),
        ({}, {"max_tokens": 2048}),
        ({"messages": TASK}, {"max_tokens": 256}),
        ({"messages": TASK, "max_completion_tokens": 1000}, {"max_tokens": 1000}),
    ],
)
async def test_settings_of_sampling_reach_the_engine(client, script, asked, sampled):
    await client.chat.completions.create(**{**ASKED, **asked})
    for name, value in sampled.items():
        assert getattr(script.sampled[-1], name) == value


async def test_the_form_of_an_answer_reaches_the_engine(client, script):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    forms = [
        ({"response_format": {"type": "json_object"}}, ("json_object", True)),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": schema, "strict": True},
                }
            },
            ("json", json.dumps(schema)),
        ),
        ({"extra_body": {"structured_outputs": {"json": schema}}}, ("json", json.dumps(schema))),
        ({"extra_body": {"structured_outputs": {"regex": "w+"}}}, ("regex", "w+")),
        ({"extra_body": {"structured_outputs": {"choice": ["a", "b"]}}}, ("choice", ("a", "b"))),
    ]
    for asked, (field, value) in forms:
        await client.chat.completions.create(**ASKED, **asked)
        assert getattr(script.sampled[-1].structured_outputs, field) == value
    await client.chat.completions.create(**ASKED, response_format={"type": "text"})
    assert script.sampled[-1].structured_outputs is None


async def test_an_error_within_a_stream_ends_it(client, script):
    script.error = RuntimeError("secret detail")
    with pytest.raises(openai.APIError, match="its log says why") as told:
        await streamed(client)
    assert "secret" not in str(told.value)


async def test_the_salt_of_a_request_reaches_the_engine(http, script):
    sent = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "w3"}]},
        "/v1/completions": {"prompt": ["w3", "w4"]},
        "/v1/responses": {"input": "w3"},
    }
    for path, body in sent.items():
        script.prompts.clear()
        for more in ({"cache_salt": "mine"}, {}):
            assert (await http.post(path, json={**body, **more})).status_code == 200
        half = len(script.prompts) // 2
        salts = [prompt.cache_salt for prompt in script.prompts]
        assert salts == ["mine"] * half + [None] * half
        for wrong in ("", "x" * 129, 5):
            answer = await http.post(path, json={**body, "cache_salt": wrong})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "cache_salt")
