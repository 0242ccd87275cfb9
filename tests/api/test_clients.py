"""Unmodified clients of a server of the embedded engine that ``serve`` has started."""

from __future__ import annotations

import itertools
import json
import shutil
from typing import Literal

import openai
import pytest

from tests.contracts.served import DOCUMENTS, Served
from tests.toy import TOY, generate_collection
from tests.unmodified_clients import QUESTION, UnmodifiedClients

KEY = "sesame"


@pytest.fixture(scope="module")
def passage() -> str:
    """Long enough to be blended."""
    documents, _ = generate_collection(3, 1, seed=5)
    return "\n\n".join(document.text for document in documents)


@pytest.fixture(scope="module")
def server(tmp_path_factory, passage):
    """The URL of a server of the bundled model that knows a document."""
    folder = tmp_path_factory.mktemp("server")
    model = shutil.copytree(TOY, folder / "toy")
    kept = ("--kv-path", str(folder / "kv"))
    with Served(model, "transformers", *kept, VLLM_API_KEY=KEY) as served:
        stored = served.ask("PUT", f"{DOCUMENTS}/notes", KEY, json={"chunks": [passage]})
        assert stored.json()["computed"] == 1
        yield served.url
        assert served.end() == 0, "told to end, it ends without an error"
        for told in (f"toy is served at {served.url}/v1", "POST /v1/chat/completions:"):
            assert told in served.log
        for untold in (KEY, "Traceback"):
            assert untold not in served.log


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"{server}/v1", api_key=KEY, max_retries=0)


def test_openai_python(client, passage):
    asked = {
        "model": "toy",
        "messages": [{"role": "user", "content": f"{passage}\n\n{QUESTION}"}],
        "max_tokens": 8,
        "temperature": 0,
    }
    expected = client.chat.completions.create(**asked).choices[0].message.content
    stream = client.chat.completions.create(**asked, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == expected
    with client.chat.completions.stream(**asked) as helper:
        *_, last = (event.snapshot for event in helper if event.type == "content.delta")
        assert last == expected
    assert client.completions.create(model="toy", prompt="Who?", max_tokens=2).choices[0].text
    answer = client.responses.create(model="toy", input="Who?", max_output_tokens=4)
    assert answer.output_text
    assert [model.id for model in client.models.list()] == ["toy"]
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="other").models.list()


class TestClients(UnmodifiedClients):
    key = KEY

    @pytest.fixture
    def url(self, server):
        return server

    def check_call(self, arguments):
        assert json.loads(arguments)["on"] in {True, False}


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
        model="toy", messages=[{"role": "user", "content": "Light!"}], response_format=Light
    )
    assert isinstance(parsed.choices[0].message.parsed, Light)
    response = client.responses.parse(model="toy", input="Light!", text_format=Light)
    assert isinstance(response.output_parsed, Light)
    model = ChatOpenAI(base_url=f"{server}/v1", api_key=KEY, model="toy", max_tokens=64)
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
        model="toy",
        is_chat_model=True,
        is_function_calling_model=True,
        max_tokens=64,
    )
    assert isinstance(like.as_structured_llm(Light).complete("Light!").raw, Light)
