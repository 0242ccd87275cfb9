"""Many requests at once, and an event loop that stays free meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from llama_index.core import VectorStoreIndex
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.response_synthesizers import get_response_synthesizer

from cacheblend_rag import Engine, SamplingParams
from llama_index.llms.cacheblend import CacheBlendLLM, CacheBlendPromptHelper
from llama_index.postprocessor.cacheblend import CacheBlendPostprocessor

REQUESTS = 32


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


async def largest_gap(work: Awaitable[Any]) -> float:
    """Return the longest time the loop did not run while ``work`` was done."""
    gaps: list[float] = []

    async def tick() -> None:
        while True:
            started = time.perf_counter()
            await asyncio.sleep(0)
            gaps.append(time.perf_counter() - started)
            await asyncio.sleep(0.001)

    ticking = asyncio.create_task(tick())
    await work
    ticking.cancel()
    return max(gaps)


async def read(stream: Awaitable[Any]) -> None:
    async for _ in await stream:
        pass


@pytest.mark.parametrize("endpoint", ["acomplete", "astream_complete", "achat", "astream_chat"])
def test_the_event_loop_never_waits_longer_than_one_step(
    endpoint: str, llm: CacheBlendLLM, demo_engine: Engine, documents: list[Any]
) -> None:
    from llama_index.core.base.llms.types import ChatMessage

    prompt = "\n\n".join(document.text for document in documents) * 3
    asked = [ChatMessage(content=prompt)] if "chat" in endpoint else prompt
    sampling = SamplingParams(max_tokens=40, ignore_eos=True)
    seconds = demo_engine.generate(prompt, sampling).report.seconds
    # The longest stretch of work: a layer of prefill, or a decode step; some room for other work.
    step = max(seconds.recompute / 4, seconds.decode / 39)
    call: Callable[..., Awaitable[Any]] = getattr(llm, endpoint)
    work = call(asked, max_tokens=40, ignore_eos=True)

    gap = asyncio.run(largest_gap(read(work) if "stream" in endpoint else work))

    assert gap < max(3 * step, 0.1)
    assert gap < (seconds.time_to_first_token + seconds.decode) / 2
