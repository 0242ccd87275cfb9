"""Many requests at once over a cache too small for them: all answers right, no block lost."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections import Counter
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from vllm.v1.request import RequestStatus

from cacheblend_rag import BlendConfig, BlendPrompt, Chunk
from cacheblend_rag.engines.sampling import ResolvedSampling
from cacheblend_rag.engines.vllm.connector.pace import Slices
from cacheblend_rag.engines.vllm.in_process import vllm_sampling
from cacheblend_rag.engines.vllm.transport import VLLMRequest
from cacheblend_rag.kv.reading import ROOM_AHEAD_BYTES
from tests.engines.vllm.forking import GPU_DEFAULTS
from tests.engines.vllm.inprocess import InProcessEngine
from tests.engines.vllm.opening import request_of
from tests.families.reference import DOCUMENTS
from tests.kv.samples import until
from tests.models import prompt_of, words

REQUESTS = 60 if GPU_DEFAULTS else 200  # an interpreter takes its time
AT_ONCE = 24
DECODED_BEFORE_ABORT = 3
CONFIG = BlendConfig(min_tokens=0, selector="hkvd", recompute_ratio=1.0)
"""Below ratio 1, an answer depends on which of a repeated blend's blocks vLLM still has."""

Fate = Literal["done", "aborted while loading", "aborted while decoding"]


def prompts_of(kind: str) -> list[BlendPrompt]:
    """Some prompts: without chunks, with stored ones, with one more that is not stored."""
    draw = random.Random(kind)
    chunks = [chunk for document in DOCUMENTS for chunk in document.to_chunks()]
    missing = Chunk(words(70, 99))
    prompts = []
    for index in range(5):
        chosen = [] if kind == "plain" else draw.sample(chunks, 2)
        chosen += [missing] if kind == "missing" else []
        parts = [part for chunk in chosen for part in (chunk, " w7 ")]
        prompts.append(prompt_of(*parts, words(90 + 7 * index, 300 + index)))
    return prompts


def requests_of(engine: InProcessEngine) -> list[VLLMRequest]:
    """Distinct requests: each prompt as it is, and blended ones by ordinary prefill, too."""
    sampling = ResolvedSampling(max_tokens=20, ignore_eos=True)
    found = []
    for kind in ("plain", "blended", "missing"):
        for prompt in prompts_of(kind):
            asked = request_of(engine, prompt, sampling, engine.config)
            found.append(asked)
            if kind != "plain":
                found.append(VLLMRequest(asked.token_ids, sampling, "ordinary"))
    return found


def unseen(request: VLLMRequest) -> VLLMRequest:
    """The same work, which vLLM cannot have in its prefix cache."""
    return replace(request, salt=uuid.uuid4().hex)


async def answer(engine: InProcessEngine, request: VLLMRequest, name: str = "") -> tuple[int, ...]:
    ids: list[int] = []
    async with aclosing(engine.vllm.outputs(request, vllm_sampling(request), name)) as steps:
        async for step in steps:
            ids += step.outputs[0].token_ids
    return tuple(ids)


async def abort(engine: InProcessEngine, request: VLLMRequest, fate: Fate) -> Fate:
    """Send a request and give it up in the wanted state; returns what became of it."""
    name = uuid.uuid4().hex
    task = asyncio.create_task(answer(engine, request, name))
    while not task.done():
        state = engine.state_of(name)
        loading = state is not None and state.status == RequestStatus.WAITING_FOR_REMOTE_KVS
        decoding = state is not None and state.num_output_tokens >= DECODED_BEFORE_ABORT
        if loading if fate == "aborted while loading" else decoding:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            return fate
        await asyncio.sleep(0)
    return "done"


@pytest.fixture
def engine(few_blocks: InProcessEngine, monkeypatch: pytest.MonkeyPatch) -> InProcessEngine:
    # The shortest slice there is: each job is spread over many steps.
    blender = few_blocks.worker_connector.blender
    monkeypatch.setattr(blender, "slices", Slices.of(torch.device("cpu"), 1e-9))
    few_blocks.precompute(DOCUMENTS, progress=False)
    return few_blocks


def test_a_mixed_load_is_answered_right_and_leaves_nothing_behind(
    engine: InProcessEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = engine.free_blocks()
    distinct = requests_of(engine)
    find = engine.scheduler_connector.finding.finder.find
    loads = [one.wish.kind == "find" and bool(find("default", one.token_ids)) for one in distinct]
    assert any(loads)
    references = [engine.transport.run(answer(engine, request)) for request in distinct]
    preempted: Counter[str] = Counter()
    preempt = engine.scheduler._preempt_request

    def counted(request: Any, *args: Any, **kwargs: Any) -> Any:
        preempted["times"] += 1
        return preempt(request, *args, **kwargs)

    monkeypatch.setattr(engine.scheduler, "_preempt_request", counted)
    draw = random.Random(1)
    fates: Counter[Fate] = Counter()

    async def run() -> None:
        gate = asyncio.Semaphore(AT_ONCE)

        async def one(index: int) -> None:
            which = draw.randrange(len(distinct))
            request = unseen(distinct[which]) if index % 3 else distinct[which]
            async with gate:
                fate: Fate = "done"
                if index % 5 == 0:
                    fate = "aborted while decoding"
                elif index % 5 == 1 and loads[which]:
                    request = unseen(request)
                    fate = "aborted while loading"
                if fate != "done":
                    fates[await abort(engine, request, fate)] += 1
                    return
                assert await answer(engine, request) == references[which], which
                fates[fate] += 1

        await asyncio.gather(*(one(index) for index in range(REQUESTS)))

    engine.transport.run(run())
    assert sum(fates.values()) == REQUESTS
    assert fates["aborted while decoding"] > REQUESTS // 10
    assert fates["aborted while loading"] >= REQUESTS // 20
    assert preempted["times"] > 0
    assert engine.free_blocks() == free
    connector, worker = engine.scheduler_connector, engine.worker_connector
    assert not connector.pending
    assert not connector.late
    assert not worker.at_work
    assert not worker.blender.at_work
    assert until(lambda: worker.blender.store.reads.room.left == ROOM_AHEAD_BYTES)
    # What was blended meanwhile is in no ordinary request's way.
    again = [engine.transport.run(answer(engine, request)) for request in distinct]
    assert again == references
