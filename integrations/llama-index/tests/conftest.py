"""Engines on the tests' small model, an index over its corpus, and scripted answers."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest
from llama_index.core import Document, MockEmbedding, Settings, VectorStoreIndex
from llama_index.core.llms import MockLLM
from llama_index.core.node_parser import SentenceSplitter
from toy import TOY, generate_collection

from cacheblend_rag import (
    BlendConfig,
    Delta,
    Engine,
    Generation,
    SamplingParams,
    ToolCall,
    open_engine,
)
from cacheblend_rag.prefill import policy
from llama_index.llms.cacheblend import CacheBlendLLM, CacheBlendPrecompute

REUSE = BlendConfig(recompute_ratio=0.0, min_tokens=32, cost_model=False)
ENGINE = os.environ.get("CACHEBLEND_TEST_ENGINE", "transformers")
"""What the bundled model runs on: ``make server_tests`` says where a server is."""


@pytest.fixture(scope="session", autouse=True)
def _noise_decides_nothing() -> Iterator[None]:
    """Prefill of models so small is never held against blending, however busy the machine is."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy, "MARGIN", 1e9)
        yield


@pytest.fixture(autouse=True)
def _offline_settings() -> Iterator[None]:
    """No test may fall back to a model of LlamaIndex's own."""
    Settings.embed_model = MockEmbedding(8)
    Settings.llm = MockLLM()
    yield
    Settings._prompt_helper = None


@pytest.fixture(scope="session")
def documents() -> list[Document]:
    """Three documents of the demo corpus, with metadata of which LLMs see a part."""
    collection, _ = generate_collection(documents=3, questions=1, seed=5)
    return [
        Document(
            text="\n\n".join(drawn.chunks),
            id_=drawn.document_id,
            metadata={"source": f"note-{index}", "size": 7},
            excluded_llm_metadata_keys=["size"],
        )
        for index, drawn in enumerate(collection)
    ]


@pytest.fixture(scope="session")
def question() -> str:
    _, questions = generate_collection(documents=3, questions=1, seed=5)
    return questions[0].question


@pytest.fixture(scope="session")
def demo_engine() -> Engine:
    """The bundled model; plain reuse, so that every token found is a token reused."""
    return open_engine(ENGINE, model=TOY, config=REUSE, instruction="Notes:\n")


@pytest.fixture
def llm(demo_engine: Engine) -> CacheBlendLLM:
    return CacheBlendLLM(engine=demo_engine, max_tokens=6)


@pytest.fixture(scope="session")
def index(demo_engine: Engine, documents: list[Document]) -> VectorStoreIndex:
    """The documents, cut into chunks of some 100 tokens and precomputed."""
    precompute = CacheBlendPrecompute(engine=demo_engine, show_progress=False)
    return VectorStoreIndex.from_documents(
        documents,
        transformations=[SentenceSplitter(chunk_size=110, chunk_overlap=0), precompute],
        embed_model=MockEmbedding(8),
    )


@pytest.fixture(
    params=["", "stream_", "a", "astream_"], ids=["whole", "stream", "async", "astream"]
)
def ask(request: pytest.FixtureRequest) -> Any:
    """Call an LLM's method in one of four ways, such as ``ask(llm, "chat", messages)``.

    Returns what it returns; of a stream, the last step.
    """

    async def awaited(found: Any) -> Any:
        found = await found
        return [step async for step in found][-1] if "stream" in request.param else found

    def call(llm: CacheBlendLLM, method: str, *args: Any, **kwargs: Any) -> Any:
        found = getattr(llm, f"{request.param}{method}")
        if request.param.startswith("a"):
            return asyncio.run(awaited(found(*args, **kwargs)))
        made = found(*args, **kwargs)
        return list(made)[-1] if request.param else made

    return call


@dataclass(frozen=True)
class Asked:
    """One request to a scripted engine."""

    prompt: Any
    sampling: SamplingParams


class Script:
    """Answers of an engine, in turn: a text, calls of tools, or a function of a Generation.

    What was asked is kept; prefill and the report are the real engine's.
    """

    def __init__(self, answers: Sequence[Any]) -> None:
        self.asked: list[Asked] = []
        self._answers = list(answers)

    def ask(self, prompt: Any, sampling: SamplingParams) -> SamplingParams:
        self.asked.append(Asked(prompt, sampling))
        return SamplingParams.greedy(max_tokens=1)

    def say(self, generation: Generation) -> Generation:
        answer = self._answers[len(self.asked) - 1]
        if callable(answer):
            return cast("Generation", answer(generation))
        if isinstance(answer, str):
            return replace(generation, text=answer, content=answer, finish_reason="stop")
        calls = tuple(
            ToolCall(f"call-{len(self.asked)}-{place}", name, json.dumps(arguments))
            for place, (name, arguments) in enumerate(answer)
        )
        text = "".join(f"<call>{call.name}{call.arguments}</call>" for call in calls)
        return replace(generation, text=text, content="", tool_calls=calls, finish_reason="stop")


def acting_engine(engine: Engine, script: Script) -> Engine:
    """Return an engine that answers by a script, also in streams."""

    def generate(self: Engine, prompt: Any, sampling: Any, **kwargs: Any) -> Generation:
        return script.say(engine.generate(prompt, script.ask(prompt, sampling), **kwargs))

    async def agenerate(self: Engine, prompt: Any, sampling: Any, **kwargs: Any) -> Generation:
        asked = script.ask(prompt, sampling)
        return script.say(await engine.agenerate(prompt, asked, **kwargs))

    def stream(self: Engine, prompt: Any, sampling: Any, **kwargs: Any) -> Iterator[Delta]:
        yield from deltas(generate(self, prompt, sampling, **kwargs))

    async def astream(
        self: Engine, prompt: Any, sampling: Any, **kwargs: Any
    ) -> AsyncIterator[Delta]:
        for delta in deltas(await agenerate(self, prompt, sampling, **kwargs)):
            yield delta

    def deltas(answer: Generation) -> Iterator[Delta]:
        text, shown = answer.text, answer.content == answer.text
        for start in range(0, len(text), 5):
            piece = text[start : start + 5]
            yield Delta(piece, content=piece if shown else "")
        yield Delta("", answer)

    acting = copy(engine)
    methods = {"generate": generate, "agenerate": agenerate, "stream": stream, "astream": astream}
    acting.__class__ = type("Acting", (type(engine),), methods)
    return acting


@pytest.fixture
def acting(demo_engine: Engine) -> Any:
    """Return an LLM that answers by a script, and the script: ``acting("Hi.", [("add", {})])``."""

    def make(*answers: Any, **fields: Any) -> tuple[CacheBlendLLM, Script]:
        script = Script(answers)
        return CacheBlendLLM(engine=acting_engine(demo_engine, script), **fields), script

    return make


@pytest.fixture
def toy_llm(request: pytest.FixtureRequest) -> CacheBlendLLM:
    """Of a namespace of its own: LLMs with equal settings share an engine while it lives."""
    return CacheBlendLLM(
        model=TOY,
        namespace=request.node.name,
        blend_config={"min_tokens": 0},
        max_tokens=2,
        is_chat_model=False,
    )
