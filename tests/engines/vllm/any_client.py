"""What any client of a server gets that knows nothing of chunks; test_server.py runs it."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import anthropic
import openai
import pytest

from cacheblend_rag import Document
from cacheblend_rag.engines.vllm.engine import VLLMEngine
from cacheblend_rag.engines.vllm.protocol.job import NOTHING_FOUND, PARAMETER, VERSION
from cacheblend_rag.engines.vllm.serve import RunningServer
from tests.models import words

LEAST = 100
"""Tokens that every request here reuses at least: its chunks have several hundred."""
FLAGS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
"""Of the server."""
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Looks a number up.",
        "parameters": {
            "type": "object",
            "properties": {"number": {"type": "integer", "minimum": 0, "maximum": 9}},
            "required": ["number"],
            "additionalProperties": False,
        },
    },
}
EXACT = {
    "version": VERSION,
    "kind": "find",
    "config": {"recompute_ratio": 1.0, "cost_model": False},
}


def logprobs(answer: Any) -> list[float]:
    return [token.logprob for token in answer.choices[0].logprobs.content]


class AnyClient:
    """openai and anthropic as they are; the fixtures ``server`` and ``engine`` are the module's."""

    key: ClassVar[str]
    texts: ClassVar[Sequence[str]] = [words(110, 700 + i) for i in range(8)]
    questions: ClassVar[Iterator[int]] = iter(range(10_000))

    @pytest.fixture(scope="class", autouse=True)
    def _stored(self, engine: VLLMEngine) -> None:
        documents = [Document(f"any {i}", (text,)) for i, text in enumerate(self.texts)]
        assert engine.precompute(documents, progress=False).refused == {}

    @pytest.fixture
    def client(self, server: RunningServer) -> Iterator[openai.OpenAI]:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key=self.key, max_retries=0) as made:
            yield made

    def prompt(self, seed: int | None = None) -> str:
        """Several known texts, in an order that no other test has, and a question."""
        number = next(self.questions) if seed is None else seed
        chosen = [self.texts[(number + i * 3) % len(self.texts)] for i in range(3)]
        listed = "\n\n".join(f"[{i}] {text}" for i, text in enumerate(chosen))
        return f"Asked {number}.\n\n{listed}\n\nWho is {words(3, number)}?"

    def messages(self, seed: int | None = None) -> Any:
        return [{"role": "user", "content": self.prompt(seed)}]

    def chat(self, client: openai.OpenAI, seed: int | None = None, **options: Any) -> Any:
        defaults = {"temperature": 0, "max_tokens": 4, "messages": self.messages(seed)}
        return client.chat.completions.create(model="toy", **{**defaults, **options})

    def cached(self, answer: Any) -> int:
        usage = answer.usage
        assert usage.prompt_tokens_details.cached_tokens < usage.prompt_tokens
        return int(usage.prompt_tokens_details.cached_tokens)

    def test_chat(self, client: openai.OpenAI) -> None:
        answer = self.chat(client)
        assert self.cached(answer) > LEAST
        assert getattr(answer, "kv_transfer_params", None) is None

    def test_a_stream(self, client: openai.OpenAI) -> None:
        stream = self.chat(client, stream=True, stream_options={"include_usage": True})
        assert self.cached(list(stream)[-1]) > LEAST

    def test_tools(self, client: openai.OpenAI) -> None:
        """The toy model writes calls letter by letter; valid ones are others' tests."""
        answer = self.chat(client, tools=[TOOL])
        assert self.cached(answer) > LEAST

    def test_completions_and_lists_of_them(self, client: openai.OpenAI) -> None:
        for prompt in (self.prompt(), [self.prompt(), self.prompt()]):
            answer = client.completions.create(model="toy", prompt=prompt, max_tokens=2)
            assert len(answer.choices) == (1 if isinstance(prompt, str) else 2)
            assert self.cached(answer) > LEAST

    def test_echo_with_log_probabilities_is_plain(self, client: openai.OpenAI) -> None:
        answer = client.completions.create(
            model="toy", prompt=self.prompt(), max_tokens=2, echo=True, logprobs=1
        )
        assert self.cached(answer) == 0

    def test_responses(self, client: openai.OpenAI) -> None:
        answer = client.responses.create(model="toy", input=self.prompt(), max_output_tokens=16)
        assert answer.usage is not None
        assert answer.usage.input_tokens_details.cached_tokens > LEAST

    def test_messages_of_anthropic(self, server: RunningServer) -> None:
        with anthropic.Anthropic(base_url=server.url, auth_token=self.key, max_retries=0) as client:
            answer = client.messages.create(model="toy", max_tokens=4, messages=self.messages())
        assert (answer.usage.cache_read_input_tokens or 0) > LEAST

    @pytest.mark.parametrize("streams", [False, True])
    def test_a_prompt_that_is_too_long_has_openais_code(
        self, client: openai.OpenAI, streams: bool
    ) -> None:
        long: list[Any] = [{"role": "user", "content": "w1 " * 9000}]
        with pytest.raises(openai.BadRequestError, match="maximum context length") as told:
            client.chat.completions.create(model="toy", messages=long, stream=streams)
        assert told.value.code == "context_length_exceeded"

    def test_ratio_1_is_plain_and_plain_is_never_blended(self, client: openai.OpenAI) -> None:
        seed = next(self.questions)
        off, told = {"kv_transfer_params": NOTHING_FOUND.to_params()}, {"logprobs": True}
        fresh = self.chat(client, seed, extra_body={**off, "cache_salt": uuid.uuid4().hex}, **told)
        assert self.cached(fresh) == 0
        blended = self.chat(client, seed, **told)
        assert logprobs(blended) != pytest.approx(logprobs(fresh), abs=1e-3)
        after = self.chat(client, seed, extra_body=off, **told)
        assert logprobs(after) == pytest.approx(logprobs(fresh), abs=1e-5)
        exact = self.chat(
            client, seed, extra_body={"kv_transfer_params": {PARAMETER: EXACT}}, **told
        )
        assert logprobs(exact) == pytest.approx(logprobs(fresh), abs=1e-5)
        assert all(chunk["hit"] for chunk in exact.kv_transfer_params[PARAMETER]["chunks"])
        again = self.chat(client, seed, **told)
        assert self.cached(again) >= self.cached(blended)
