"""What is to be filled or compared waits until vLLM does nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from cacheblend_rag import BlendConfig, Document
from cacheblend_rag.engines.sampling import ResolvedSampling
from cacheblend_rag.engines.vllm.protocol.job import Compare
from cacheblend_rag.engines.vllm.protocol.result import CompareResult, PrecomputeResult
from cacheblend_rag.engines.vllm.transport import VLLMRequest
from cacheblend_rag.prefill.precompute import document_plans
from tests.engines.vllm.inprocess import InProcessEngine
from tests.models import words

CONFIG = BlendConfig(min_tokens=0, selector="hkvd", recompute_ratio=0.3)
Work = Coroutine[Any, Any, Any]


def finished(engine: InProcessEngine, **work: Work) -> list[str]:
    """Begin several things at once; return their names in the order of their ends."""
    ended: list[str] = []

    async def one(name: str, work: Work) -> None:
        match await work:
            case PrecomputeResult(computed=3) | CompareResult() | None:
                ended.append(name)

    async def main() -> None:
        await asyncio.gather(*(one(name, part) for name, part in work.items()))

    engine.transport.run(main())
    return ended


async def asked(engine: InProcessEngine, tokens: int) -> None:
    """Decode some tokens."""
    prompt = tuple(engine.tokenize(words(20, tokens)))
    sampling = ResolvedSampling(max_tokens=tokens, ignore_eos=True)
    async for _ in engine.transport.send(VLLMRequest(prompt, sampling), stream=True):
        pass


def test_idle_work_is_done_when_nobody_decodes(llama: InProcessEngine) -> None:
    def stored(seed: int, *, idle: bool) -> Work:
        texts = tuple(words(60 + i, seed + i) for i in range(3))
        chunks = Document(f"d{seed}", texts, separator=" w77 ").to_chunks()
        (run,) = document_plans(llama._led.resolve(chunk) for chunk in chunks)
        return llama.carry_out(llama._precompute(run, idle=idle))

    ordinary = finished(llama, fill=stored(1, idle=False), answer=asked(llama, 60))
    assert ordinary == ["fill", "answer"]
    idle = finished(llama, fill=stored(11, idle=True), answer=asked(llama, 61))
    assert idle == ["answer", "fill"]
    both = finished(llama, fill=stored(21, idle=True), index=stored(31, idle=False))
    assert both == ["index", "fill"], "whoever waits for what is stored comes first, too"
    prompt = tuple(llama.tokenize(f"w5 {words(60, 1)} w9"))
    compared = llama.carry_out(Compare(tokens=prompt, answer=(5, 6), config=CONFIG))
    assert finished(llama, compare=compared, answer=asked(llama, 62)) == ["answer", "compare"]
