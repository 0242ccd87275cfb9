"""What is to be filled waits until vLLM does nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from cacheblend_rag.engines.vllm.job_client import JobClient

from cacheblend_rag import BlendConfig, Chunk, Document
from cacheblend_rag.engines.sampling import ResolvedSampling
from cacheblend_rag.engines.vllm.protocol.result import PrecomputeResult
from cacheblend_rag.engines.vllm.transport import VLLMRequest
from cacheblend_rag.prefill.precompute import document_plans
from tests.engines.vllm.inprocess import InProcessEngine
from tests.engines.vllm.opening import request_of
from tests.models import prompt_of, words

CONFIG = BlendConfig(min_tokens=0, selector="hkvd", recompute_ratio=0.3)


@pytest.fixture
def blend_config() -> BlendConfig:
    return CONFIG


def finished(engine: InProcessEngine, *work: tuple[str, Coroutine[Any, Any, Any]]) -> list[str]:
    """Begin several things at once; return their names in the order of their ends."""
    ended: list[str] = []

    async def one(name: str, work: Coroutine[Any, Any, Any]) -> None:
        result = await work
        assert result is None or (isinstance(result, PrecomputeResult) and result.computed == 3)
        ended.append(name)

    async def main() -> None:
        await asyncio.gather(*(one(name, part) for name, part in work))

    engine.transport.run(main())
    return ended


async def asked(engine: InProcessEngine, tokens: int) -> None:
    """Decode some tokens."""
    prompt = tuple(engine.tokenize(words(20, tokens)))
    sampling = ResolvedSampling(max_tokens=tokens, ignore_eos=True)
    async for _ in engine.transport.send(VLLMRequest(prompt, sampling), stream=True):
        pass


def test_a_fill_is_done_when_nobody_decodes(llama: InProcessEngine) -> None:
    blend = request_of(llama, prompt_of(Chunk(words(30, 5)), words(5, 6)), None, None).job
    assert blend is not None
    jobs = JobClient(llama.transport, blend.lead_in, llama.status)

    def stored(seed: int, *, idle: bool) -> Coroutine[Any, Any, Any]:
        texts = tuple(words(60 + i, seed + i) for i in range(3))
        chunks = Document(f"d{seed}", texts, separator=" w77 ").to_chunks()
        (run,) = document_plans(llama._led.resolve(chunk) for chunk in chunks)
        return jobs.precompute(run, idle=idle)

    ordinary = finished(llama, ("fill", stored(1, idle=False)), ("answer", asked(llama, 60)))
    assert ordinary == ["fill", "answer"]
    idle = finished(llama, ("fill", stored(11, idle=True)), ("answer", asked(llama, 61)))
    assert idle == ["answer", "fill"]
    both = finished(llama, ("fill", stored(21, idle=True)), ("index", stored(31, idle=False)))
    assert both == ["index", "fill"], "whoever waits for what is stored comes first, too"
