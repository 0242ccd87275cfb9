"""What clients that nobody here made get of a server: LangChain, LlamaIndex, curl, Node.js.

A test class inherits UnmodifiedClients, has the server's ``key``, and fixtures ``url`` and
``passage``: a stored text. The model is called demo.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import ClassVar

import openai
import pytest

NPM_OPENAI = "openai@7.57.0"
QUESTION = "Question: Who?\nAnswer:"


def curl(*arguments: str) -> str:
    found = subprocess.run(["curl", "-sS", *arguments], check=True, capture_output=True, text=True)
    return found.stdout


class UnmodifiedClients:
    """Every client gets the same greedy answer, and is told what was reused."""

    key: ClassVar[str]

    @pytest.fixture
    def prompt(self, passage: str) -> str:
        return f"{passage}\n\n{QUESTION}"

    @pytest.fixture
    def expected(self, url: str, prompt: str) -> str:
        """The greedy answer to the question about the passage."""
        client = openai.OpenAI(base_url=f"{url}/v1", api_key=self.key, max_retries=0)
        answer = client.chat.completions.create(
            model="toy",
            messages=[{"role": "user", "content": prompt}],
            max_tokens=8,
            temperature=0,
        )
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens, "the document's KV is reused"
        return answer.choices[0].message.content or ""

    def test_langchains_chat_openai(self, url: str, prompt: str, expected: str) -> None:
        from langchain_openai import ChatOpenAI

        told = {"base_url": f"{url}/v1", "api_key": self.key, "model": "toy", "max_tokens": 8}
        model = ChatOpenAI(**told, temperature=0)
        answer = model.invoke(prompt)
        assert answer.content == expected
        assert answer.usage_metadata is not None
        assert answer.usage_metadata["input_token_details"]["cache_read"] > 0
        chunks = list(model.stream(prompt, stream_usage=True))
        assert "".join(chunk.text for chunk in chunks) == expected
        assert [one.content for one in model.batch([prompt, prompt])] == [expected] * 2
        responses = ChatOpenAI(**{**told, "max_tokens": 16}, use_responses_api=True)
        assert responses.invoke("Who?").text
        assert "".join(chunk.text for chunk in responses.stream("Who?"))
        said = "This model's maximum context length is [0-9]+ tokens. However, .*[0-9]+ .*tokens"
        with pytest.raises(openai.BadRequestError, match=said):  # what litellm and others look for
            model.invoke("Who? " * 9000)

    def test_llama_indexs_openai_like(self, url: str, prompt: str, expected: str) -> None:
        from llama_index.core.llms import ChatMessage
        from llama_index.llms.openai_like import OpenAILike

        told = {"api_base": f"{url}/v1", "api_key": self.key, "model": "toy"}
        model = OpenAILike(**told, is_chat_model=True, max_tokens=8, temperature=0)
        message = [ChatMessage(role="user", content=prompt)]
        answer = model.chat(message)
        assert answer.message.content == expected
        assert answer.raw.usage.prompt_tokens_details.cached_tokens > 0
        *_, last = model.stream_chat(message)
        assert last.message.content == expected
        assert OpenAILike(**told, max_tokens=4).complete("Who?").text

    def test_curl(self, url: str, prompt: str, expected: str) -> None:
        route, key = f"{url}/v1/chat/completions", ("-H", f"Authorization: Bearer {self.key}")
        as_json = ("-H", "Content-Type: application/json")
        messages = [{"role": "user", "content": prompt}]
        asked = {"model": "toy", "messages": messages, "max_tokens": 8, "temperature": 0}
        answer = json.loads(curl(route, *key, *as_json, "-d", json.dumps(asked)))
        assert answer["choices"][0]["message"]["content"] == expected
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        streamed = curl("-N", route, *key, *as_json, "-d", json.dumps({**asked, "stream": True}))
        assert streamed.endswith("data: [DONE]\n\n")
        status = ("-o", os.devnull, "-w", "%{http_code}")
        assert curl(*status, route, *as_json, "-d", "{}") == "401"
        assert curl(*status, route, *key, *as_json, "-d", "{}") == "400"

    @pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")
    def test_npms_openai(self, url: str, passage: str, expected: str, tmp_path: Path) -> None:
        shutil.copy(Path(__file__).with_name("client.mjs"), tmp_path)
        quiet = ("--no-package-lock", "--no-audit", "--no-fund", "--loglevel=error")
        install = ["npm", "install", *quiet, NPM_OPENAI]
        subprocess.run(install, cwd=tmp_path, check=True, timeout=300)
        command = ["node", "client.mjs", url, self.key, "toy", passage]
        ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stderr
        told = json.loads(ran.stdout)
        assert told["whole"] == told["streamed"] == told["helped"] == expected
        assert told["cached"] > 0
        assert told["streamedCached"] > 0
        assert told["models"] == ["toy"]
        assert told["response"]
        assert told["last"] in {"response.completed", "response.incomplete"}
        assert told["failed"] == 404
        self.check_call(told["arguments"])

    def check_call(self, arguments: str | None) -> None:
        """Judge the arguments of a call that was required of the toy model; None is no call."""
