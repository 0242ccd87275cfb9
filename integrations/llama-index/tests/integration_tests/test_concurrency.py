"""Many requests at once, and an event loop that stays free meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from threading import Event
from typing import Any

import pytest
from llama_index.core import VectorStoreIndex
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.response_synthesizers import get_response_synthesizer

from cacheblend_rag import Engine, TransformersEngine
from llama_index.llms.cacheblend import CacheBlendLLM, CacheBlendPromptHelper
from llama_index.postprocessor.cacheblend import CacheBlendPostprocessor

REQUESTS = 32
TOKENS = 10


@pytest.fixture
def query_engine(index: VectorStoreIndex, llm: CacheBlendLLM) -> RetrieverQueryEngine:
    return RetrieverQueryEngine(
        index.as_retriever(similarity_top_k=2),
        get_response_synthesizer(llm=llm, prompt_helper=CacheBlendPromptHelper.from_llm(llm)),
        node_postprocessors=[CacheBlendPostprocessor(llm=llm)],
    )


def questions() -> list[str]:
    return [f"Question {n}: who plays the cello?" for n in range(REQUESTS)]


def test_concurrent_answers_equal_sequential_ones(query_engine: RetrieverQueryEngine) -> None:
    async def together() -> list[Any]:
        return await asyncio.gather(*(query_engine.aquery(asked) for asked in questions()))

    one_by_one = [str(query_engine.query(asked)) for asked in questions()]
    assert [str(answer) for answer in asyncio.run(together())] == one_by_one


async def read(stream: Awaitable[Any]) -> None:
    async for _ in await stream:
        pass


@pytest.fixture
def held_layer(demo_engine: Engine) -> Iterator[Event]:
    """An event that the first layer blocks on in each forward pass (in-process engine only)."""
    has_run = Event()
    if not isinstance(demo_engine, TransformersEngine):
        yield has_run
        return
    waits = 0

    def wait(*_: Any) -> None:
        nonlocal waits
        waits += 1
        has_run.clear()
        assert has_run.wait(30), "the event loop waits for the model"

    with demo_engine.model.model.layers[0].input_layernorm.register_forward_pre_hook(wait):
        yield has_run
    assert waits >= TOKENS


@pytest.mark.parametrize("endpoint", ["acomplete", "astream_complete", "achat", "astream_chat"])
def test_the_event_loop_runs_while_a_layer_computes(
    endpoint: str, llm: CacheBlendLLM, held_layer: Event, documents: list[Any]
) -> None:
    from llama_index.core.base.llms.types import ChatMessage

    turns = 0

    async def run_beside(work: Awaitable[Any]) -> None:
        async def run() -> None:
            nonlocal turns
            while True:
                turns += 1
                held_layer.set()
                await asyncio.sleep(0)

        runner = asyncio.create_task(run())
        await work
        runner.cancel()

    prompt = "\n\n".join(document.text for document in documents) * 3
    asked = [ChatMessage(content=prompt)] if "chat" in endpoint else prompt
    call: Callable[..., Awaitable[Any]] = getattr(llm, endpoint)
    work = call(asked, max_tokens=TOKENS, ignore_eos=True)
    asyncio.run(run_beside(read(work) if "stream" in endpoint else work))
    assert turns >= 20 * TOKENS, "it ran little more often than tokens arrived"
