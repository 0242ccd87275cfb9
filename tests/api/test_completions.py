"""Completions, as an unmodified OpenAI client reads them."""

from __future__ import annotations

from contextlib import closing

import openai
import pytest
import torch
from openai.types import Completion

from cacheblend_rag import TransformersEngine, load_tokenizer
from cacheblend_rag.api.app import create_app
from tests.api.conftest import openai_client
from tests.api.scripted import ScriptedEngine
from tests.contracts.engine import embedded_model, tokenizer_with_template
from tests.toy import TOY

pytestmark = pytest.mark.asyncio


async def test_a_text_and_several(http, client, script):
    answer = await http.post("/v1/completions", json={"model": "model", "prompt": "w3 w4"})
    told = Completion.model_validate(answer.json(), strict=True)
    assert (told.choices[0].text, told.choices[0].finish_reason) == ("Hello, wörld", "stop")
    assert (told.usage.prompt_tokens, told.usage.completion_tokens) == (2, 3)
    several = await client.completions.create(model="model", prompt=["w3", "w4 w5"], n=2)
    assert [choice.index for choice in several.choices] == [0, 1, 2, 3]
    assert (several.usage.prompt_tokens, several.usage.completion_tokens) == (3, 12)
    texts = [prompt.text for prompt in script.prompts[1:]]
    assert sorted(texts) == ["w3", "w3", "w4 w5", "w4 w5"]


async def test_token_ids_are_the_prompt_as_they_are(client, script):
    await client.completions.create(model="model", prompt=[3, 4, 5])
    assert script.prompts[-1].token_ids == (3, 4, 5)
    await client.completions.create(model="model", prompt=[[3], [1, 0, 4]])
    assert sorted(prompt.token_ids for prompt in script.prompts[1:]) == [(1, 0, 4), (3,)]


async def test_tokens_whose_text_reads_otherwise_are_kept():
    """As a client may cut a text: the same characters in other tokens."""
    engine = ScriptedEngine(load_tokenizer(TOY))
    client = openai_client(create_app(engine))
    letters = [token for letter in "Egypt" for token in engine.tokenize(letter)]
    assert len(engine.tokenize("Egypt")) < len(letters)
    await client.completions.create(model="hash", prompt=letters)
    assert engine.script.prompts[-1].token_ids == tuple(letters)
    assert engine.script.prompts[-1].room == engine.context_window - len(letters)
    with pytest.raises(openai.BadRequestError, match="context window") as told:
        await client.completions.create(model="hash", prompt=letters * (1 << 13))
    assert told.value.code == "context_length_exceeded"
    engine.close()


async def test_the_prompt_is_echoed(client):
    asked = {"model": "model", "prompt": "w3 w4", "echo": True}
    answer = await client.completions.create(**asked)
    assert answer.choices[0].text == "w3 w4Hello, wörld"
    alone = await client.completions.create(**asked, max_tokens=0)
    assert (alone.choices[0].text, alone.choices[0].logprobs) == ("w3 w4", None)
    stream = await client.completions.create(**asked, stream=True)
    assert "".join([c.choices[0].text async for c in stream]) == "w3 w4Hello, wörld"


async def test_a_stream_is_the_answer_in_pieces(http, client):
    asked = {"model": "model", "prompt": ["w3", "w4"], "stream": True}
    stream = await client.completions.create(**asked, stream_options={"include_usage": True})
    *chunks, last = [chunk async for chunk in stream]
    for index in (0, 1):
        own = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert "".join(one.text for one in own) == "Hello, wörld"
        assert own[-1].finish_reason == "stop"
    assert last.usage.completion_tokens == 6
    raw = (await http.post("/v1/completions", json=asked)).text
    *events, done, rest = raw.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    for event in events[:-1]:
        told = event.removeprefix("data: ")
        assert '"object":"text_completion"' in told


async def test_logprobs_have_the_form_of_completions(client):
    answer = await client.completions.create(model="model", prompt="w3", logprobs=2)
    told = answer.choices[0].logprobs
    assert told.tokens == ["Hello", ", ", "wörld"]
    assert told.token_logprobs == [-0.5] * 3
    assert told.text_offset == [0, 5, 7]
    assert told.top_logprobs[0] == {"t0": -1.0, "t1": -2.0}
    stream = await client.completions.create(model="model", prompt="w3", logprobs=0, stream=True)
    lines = [chunk.choices[0].logprobs async for chunk in stream]
    assert [at for line in lines if line for at in line.text_offset] == [0, 5, 7]


async def test_the_prompts_own_logprobs_are_the_models():
    model = embedded_model()
    prompt, most = [3 + n % 250 for n in range(0, 900, 3)], 2
    logits = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    likely = logits[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist()
    with closing(TransformersEngine(model, tokenizer=tokenizer_with_template())) as engine:
        client = openai_client(create_app(engine, name="model"))
        asked = {"model": "model", "prompt": prompt, "echo": True, "logprobs": most}
        for new in (0, 2):
            answer = await client.completions.create(**asked, max_tokens=new)
            told = answer.choices[0].logprobs
            assert answer.usage.completion_tokens == new
            assert len(told.tokens) == len(prompt) + new
            assert (told.token_logprobs[0], told.top_logprobs[0]) == (None, None)
            assert told.token_logprobs[1 : len(prompt)] == pytest.approx(likely, abs=1e-4)
            assert len(told.top_logprobs[5]) <= most
            report = answer.model_extra["cacheblend"]["report"]
            assert report["reason_code"] == "full_prefill_asked"
            assert report["reason"] == "log-probabilities of the prompt were asked for"
