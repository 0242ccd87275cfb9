"""VLLMEngine alone: ways of blending, preemption, and what cannot be blended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from threading import Event

import pytest

from cacheblend_rag import BlendConfig, Chunk
from cacheblend_rag.engines.stream import Cancellation
from cacheblend_rag.engines.vllm.transport import Piece, VLLMRequest, next_piece
from tests.engines.vllm.conftest import EngineFactory
from tests.engines.vllm.exactness import SHORT
from tests.engines.vllm.inprocess import InProcessEngine
from tests.engines.vllm.opening import same_tokens, share_cores
from tests.families.reference import DOCUMENTS, retrieved
from tests.models import prompt_of, words

REUSE = BlendConfig(min_tokens=0, recompute_ratio=0.0)


class Pieces:
    """One piece, then none for ever; how the wait for it ended, cleaning up after it included."""

    def __init__(self, error: type[Exception] | None = None) -> None:
        self.error, self.cleaning, self.ended = error, asyncio.Event(), ""
        self.cancel = Event()

    async def send(self) -> AsyncGenerator[Piece]:
        try:
            yield Piece("one", (1,))
            await asyncio.Event().wait()
        finally:
            self.cleaning.set()
            self.ended = "interrupted"
            await asyncio.sleep(0.05)
            self.ended = "cleaned up"
            if self.error:
                raise self.error

    async def read(self) -> list[Piece]:
        read = []
        async with aclosing(self.send()) as pieces:
            while piece := await next_piece(pieces, Cancellation(self.cancel)):
                read.append(piece)
                asyncio.get_running_loop().call_later(0.02, self.cancel.set)
        return read


@pytest.mark.parametrize("error", [None, OSError, TimeoutError])
def test_a_cancelled_request_ends_at_once_however_its_transport_takes_it(
    error: type[Exception] | None,
) -> None:
    """It would wait for ever."""

    async def main() -> tuple[list[Piece], str]:
        pieces = Pieces(error)
        return await asyncio.wait_for(pieces.read(), 10.0), pieces.ended

    assert asyncio.run(main()) == ([Piece("one", (1,))], "cleaned up")


def test_a_batch_is_sent_in_groups_that_share_chunks(
    llama: InProcessEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM runs requests in the order in which they come."""
    topics = [[Chunk(words(20, 10 * topic + n)) for n in range(2)] for topic in range(2)]
    llama.precompute([chunk for topic in topics for chunk in topic], progress=False)
    prompts = [llama.prepare(prompt_of(words(3, n), *topics[n % 2], "w9")) for n in range(16)]
    send, sent = llama.transport.send, list[tuple[int, ...]]()

    def noting(request: VLLMRequest, *, stream: bool) -> AsyncIterator[Piece]:
        sent.append(tuple(request.token_ids))
        return send(request, stream=stream)

    monkeypatch.setattr(llama.transport, "send", noting)
    answers = llama.generate_batch(prompts, SHORT)
    order = [*range(0, 16, 2), *range(1, 16, 2)]
    assert sent[:16] == [tuple(prompts[index].token_ids) for index in order]
    alone = [llama.generate(prompt, SHORT) for prompt in prompts]
    assert same_tokens(alone, answers)


def test_every_replica_has_the_chunks_and_answers_for_its_reports(
    open_vllm: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM sends requests to whichever replica is free; each has a memory of its own."""
    share_cores(monkeypatch)
    engine = open_vllm(config=REUSE, data_parallel_size=2)
    assert engine.status.replicas == 2
    assert engine.precompute(DOCUMENTS, progress=False).computed == 4
    for seed in range(4):
        whole = engine.generate(retrieved(seed=20 + seed), SHORT)
        *_, last = engine.stream(retrieved(seed=30 + seed), SHORT)
        assert last.generation is not None
        for answer in (whole, last.generation):
            assert [chunk.hit for chunk in answer.report.chunks] == [True] * 3
    for document in DOCUMENTS:
        engine.evict_document(document.document_id)
    for seed in range(4):
        report = engine.generate(retrieved(seed=40 + seed), SHORT).report
        assert [chunk.hit for chunk in report.chunks] == [False] * 3
