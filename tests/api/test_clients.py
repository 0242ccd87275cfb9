"""Unmodified clients of a server that ``serve`` has started: Python, frameworks, Node.js, curl."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Literal

import httpx
import openai
import pytest

from cacheblend_rag.demo.corpus import generate_collection
from tests.local_servers import HOST, free_port

NPM_OPENAI = "openai@7.57.0"
KEY = "sesame"
START_SECONDS = 120.0
QUESTION = "Question: Who?\nAnswer:"


@pytest.fixture(scope="module")
def passage() -> str:
    """Long enough to be blended."""
    documents, _ = generate_collection(3, 1, seed=5)
    return "\n\n".join(document.text for document in documents)


@pytest.fixture(scope="module")
def server(tmp_path_factory, passage):
    """The URL of a server of the bundled model that knows a document."""
    port, folder = free_port(), tmp_path_factory.mktemp("server")
    command = [
        *(sys.executable, "-m", "cacheblend_rag", "serve", "demo", "--engine", "transformers"),
        *("--port", str(port), "--kv-path", str(folder / "kv")),
    ]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command, stderr=log, env={**os.environ, "VLLM_API_KEY": KEY, "OMP_NUM_THREADS": "1"}
        )
    url, end = f"http://{HOST}:{port}", time.monotonic() + START_SECONDS
    while not answers(url):
        assert process.poll() is None, (folder / "log").read_text()
        assert time.monotonic() < end
        time.sleep(0.1)
    stored = httpx.put(
        f"{url}/v1/cacheblend/documents/notes",
        json={"chunks": [passage]},
        headers={"Authorization": f"Bearer {KEY}"},
        timeout=120,
    )
    assert stored.json()["computed"] == 1
    yield url
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0, "told to end, it ends without an error"
    told = (folder / "log").read_text()
    assert f"demo is served at {url}/v1" in told
    assert "POST /v1/chat/completions:" in told
    assert KEY not in told
    assert "Traceback" not in told


def answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"{server}/v1", api_key=KEY, max_retries=0)


@pytest.fixture(scope="module")
def expected(client, passage) -> str:
    """The greedy answer to the question about the passage."""
    answer = client.chat.completions.create(
        model="demo",
        messages=[{"role": "user", "content": f"{passage}\n\n{QUESTION}"}],
        max_tokens=8,
        temperature=0,
    )
    assert answer.usage.prompt_tokens_details.cached_tokens > 0, "the document's KV is reused"
    return answer.choices[0].message.content


def test_openai_python(client, passage, expected):
    asked = {
        "model": "demo",
        "messages": [{"role": "user", "content": f"{passage}\n\n{QUESTION}"}],
        "max_tokens": 8,
        "temperature": 0,
    }
    stream = client.chat.completions.create(**asked, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == expected
    with client.chat.completions.stream(**asked) as helper:
        *_, last = (event.snapshot for event in helper if event.type == "content.delta")
        assert last == expected
    assert client.completions.create(model="demo", prompt="Who?", max_tokens=2).choices[0].text
    answer = client.responses.create(model="demo", input="Who?", max_output_tokens=4)
    assert answer.output_text
    assert [model.id for model in client.models.list()] == ["demo"]
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="other").models.list()


def test_langchains_chat_openai(server, passage, expected):
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(
        base_url=f"{server}/v1", api_key=KEY, model="demo", max_tokens=8, temperature=0
    )
    prompt = f"{passage}\n\n{QUESTION}"
    answer = model.invoke(prompt)
    assert answer.content == expected
    assert answer.usage_metadata["input_token_details"]["cache_read"] > 0
    chunks = list(model.stream(prompt, stream_usage=True))
    assert "".join(chunk.text for chunk in chunks) == expected
    assert [one.content for one in model.batch([prompt, prompt])] == [expected] * 2
    responses = ChatOpenAI(
        base_url=f"{server}/v1", api_key=KEY, model="demo", max_tokens=8, use_responses_api=True
    )
    assert responses.invoke("Who?").text
    assert "".join(chunk.text for chunk in responses.stream("Who?"))


def test_llama_indexs_openai_like(server, passage, expected):
    from llama_index.core.llms import ChatMessage
    from llama_index.llms.openai_like import OpenAILike

    model = OpenAILike(
        api_base=f"{server}/v1",
        api_key=KEY,
        model="demo",
        is_chat_model=True,
        max_tokens=8,
        temperature=0,
    )
    message = [ChatMessage(role="user", content=f"{passage}\n\n{QUESTION}")]
    assert model.chat(message).message.content == expected
    *_, last = model.stream_chat(message)
    assert last.message.content == expected
    plain = OpenAILike(api_base=f"{server}/v1", api_key=KEY, model="demo", max_tokens=4)
    assert plain.complete("Who?").text


def curl(*arguments: str) -> str:
    found = subprocess.run(["curl", "-sS", *arguments], check=True, capture_output=True, text=True)
    return found.stdout


def test_curl(server, passage, expected):
    url, key = f"{server}/v1/chat/completions", ("-H", f"Authorization: Bearer {KEY}")
    as_json = ("-H", "Content-Type: application/json")
    asked = {
        "messages": [{"role": "user", "content": f"{passage}\n\n{QUESTION}"}],
        "max_tokens": 8,
        "temperature": 0,
    }
    answer = json.loads(curl(url, *key, *as_json, "-d", json.dumps(asked)))
    assert answer["choices"][0]["message"]["content"] == expected
    streamed = curl("-N", url, *key, *as_json, "-d", json.dumps({**asked, "stream": True}))
    assert streamed.endswith("data: [DONE]\n\n")
    status = ("-o", os.devnull, "-w", "%{http_code}")
    assert curl(*status, url, *as_json, "-d", "{}") == "401"
    assert curl(*status, url, *key, *as_json, "-d", "{}") == "400"
    told = json.loads(curl(url, *key, "-d", json.dumps(asked)))
    assert "Content-Type: application/json" in told["error"]["message"]


@pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")
def test_npms_openai(server, passage, expected, tmp_path):
    shutil.copy(Path(__file__).parent / "client.mjs", tmp_path)
    quiet = ("--no-package-lock", "--no-audit", "--no-fund", "--loglevel=error")
    subprocess.run(["npm", "install", *quiet, NPM_OPENAI], cwd=tmp_path, check=True, timeout=300)
    command = ["node", "client.mjs", server, KEY, "demo", passage]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout)
    assert told["whole"] == told["streamed"] == told["helped"] == expected
    assert told["cached"] == told["streamedCached"] > 0
    assert json.loads(told["arguments"])["on"] in {True, False}
    assert told["models"] == ["demo"]
    assert told["response"]
    assert told["last"] in {"response.completed", "response.incomplete"}
    assert told["failed"] == {"status": 404, "code": "model_not_found"}


def test_forms_and_calls_hold_with_every_client(server, client):
    """Whatever the model would say: answers are held to the form."""
    from langchain_openai import ChatOpenAI
    from llama_index.llms.openai_like import OpenAILike
    from pydantic import BaseModel

    class Light(BaseModel):
        """Switch a light."""

        room: Literal["kitchen", "hall"]
        on: bool

    parsed = client.chat.completions.parse(
        model="demo", messages=[{"role": "user", "content": "Light!"}], response_format=Light
    )
    assert isinstance(parsed.choices[0].message.parsed, Light)
    response = client.responses.parse(model="demo", input="Light!", text_format=Light)
    assert isinstance(response.output_parsed, Light)
    model = ChatOpenAI(base_url=f"{server}/v1", api_key=KEY, model="demo", max_tokens=64)
    for method in ("json_schema", "function_calling"):
        answer = model.with_structured_output(Light, method=method).invoke("Light!")
        assert isinstance(answer, Light), method
    bound = model.bind_tools([Light], tool_choice="any")
    (call,) = bound.invoke("Light!").tool_calls[:1]
    assert (call["name"], Light(**call["args"])) == ("Light", Light(**call["args"]))
    *_, last = itertools.accumulate(bound.stream("Light!"))
    assert last.tool_calls[0]["name"] == "Light"
    like = OpenAILike(
        api_base=f"{server}/v1",
        api_key=KEY,
        model="demo",
        is_chat_model=True,
        is_function_calling_model=True,
        max_tokens=64,
    )
    assert isinstance(like.as_structured_llm(Light).complete("Light!").raw, Light)
