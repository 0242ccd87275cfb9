"""Responses, as an unmodified OpenAI client reads them."""

from __future__ import annotations

import openai
import pytest
from openai.types.responses import Response

from cacheblend_rag import ToolCall

pytestmark = pytest.mark.asyncio
TOOL = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {}},
    "strict": False,
}


async def test_a_response_is_one_of_the_api(http, client):
    answer = await http.post("/v1/responses", json={"model": "model", "input": "w3 w4"})
    told = Response.model_validate(answer.json())
    assert (told.output_text, told.status, told.store) == ("Hello, wörld", "completed", False)
    assert told.usage.total_tokens == told.usage.input_tokens + told.usage.output_tokens
    assert told.usage.input_tokens_details.cached_tokens == 0
    parsed = await client.responses.create(
        model="model", input="w3", top_logprobs=2, include=["message.output_text.logprobs"]
    )
    (part,) = parsed.output[0].content
    assert [one.token for one in part.logprobs] == ["Hello", ", ", "wörld"]
    assert len(part.logprobs[0].top_logprobs) == 2


async def test_an_answer_that_was_cut_off_is_incomplete(client, script):
    script.reason = "length"
    answer = await client.responses.create(model="model", input="w3", max_output_tokens=3)
    assert answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert script.sampled[-1].max_tokens == 3
    stream = await client.responses.create(model="model", input="w3", stream=True)
    assert [event.type async for event in stream][-1] == "response.incomplete"


async def test_items_of_the_input_become_messages(client, script):
    await client.responses.create(
        model="model",
        instructions="w7",
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": "w3"}]},
            {"type": "reasoning", "id": "r", "summary": []},
            {"role": "assistant", "content": [{"type": "output_text", "text": "w5"}]},
            {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
            {"type": "function_call", "call_id": "d", "name": "weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "w8"},
            {"role": "developer", "content": "w9"},
        ],
        tools=[TOOL],
        tool_choice={"type": "function", "name": "weather"},
    )
    source = script.prompts[-1].source
    roles = ["system", "user", "assistant", "tool", "system"]
    assert [one["role"] for one in source.messages] == roles
    assert source.messages[2]["content"] == "w5"
    assert [call["id"] for call in source.messages[2]["tool_calls"]] == ["c", "d"]
    assert source.tools[0]["function"]["name"] == "weather"
    assert source.tool_choice == {"type": "function", "function": {"name": "weather"}}


async def test_a_stream_adds_up_to_the_response(client, script):
    script.calls = (ToolCall("call_1", "weather", '{"a":1}'),)
    stream = await client.responses.create(model="model", input="w3", tools=[TOOL], stream=True)
    events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == "Hello, wörld"
    done = [e for e in events if e.type == "response.output_item.done"]
    assert [event.item.type for event in done] == ["message", "function_call"]
    (arguments,) = [e for e in events if e.type == "response.function_call_arguments.done"]
    assert arguments.arguments == '{"a":1}'
    final = events[-1].response
    assert (final.output_text, final.output[1].call_id) == ("Hello, wörld", "call_1")
    async with client.responses.stream(model="model", input="w3", tools=[TOOL]) as helper:
        assert (await helper.get_final_response()).output_text == "Hello, wörld"


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id is not supported: the server"),
        ({"background": True}, "background is not supported"),
        ({"input": []}, "input is empty"),
        ({"input": [{"role": "robot", "content": "w3"}]}, r"input\[0\].role must be user"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, r"input\[0\].type must be message"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "only text"),
        ({"tools": [{"type": "web_search"}]}, r"tools\[0\].type must be 'function'"),
    ],
)
async def test_what_the_server_lacks_is_said(client, asked, said):
    with pytest.raises(openai.BadRequestError, match=said):
        await client.responses.create(**{"model": "model", "input": "w3", **asked})


async def test_an_error_within_a_stream_is_an_event(client, script):
    script.error = RuntimeError("secret detail")
    stream = await client.responses.create(model="model", input="w3", stream=True)
    last = [event async for event in stream][-1]
    assert (last.type, "its log says why" in last.message) == ("error", True)
