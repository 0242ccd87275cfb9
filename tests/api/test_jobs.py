"""Jobs over HTTP: who may have what done, and when it stops."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cacheblend_rag.engines.vllm.protocol.job import CHANGES, Ask, Job, Precompute, StoreJob
from cacheblend_rag.engines.vllm.protocol.result import LookupResult, Result, params_of
from cacheblend_rag.kv.chunk_kv import chunk_id
from cacheblend_rag.prefill.lead_in import LeadInId
from tests.api.conftest import Caller
from tests.api.scripted import ScriptedEngine

pytestmark = pytest.mark.asyncio
ASK, STORE, PATH = "sesame", "barley", "/v1/cacheblend/jobs"
LEAD_IN = LeadInId("none", chunk_id(()), 0)
JOBS: list[Job] = [
    Precompute(lead_in=LEAD_IN, tokens=(1, 2), chunks=((0, 2),)),
    *(StoreJob(kind=kind, lead_in=LEAD_IN, keys=()) for kind in ("lookup", "verify", "evict")),
    Ask(kind="status"),
    Ask(kind="release"),
]
TOLD = LookupResult((1,), unknown=(2,))


class Doing(ScriptedEngine):
    """Does jobs by noting them; may_end: until then they run."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[Job] = []
        self.begun, self.may_end, self.cancelled = asyncio.Event(), asyncio.Event(), False

    async def carry_out(self, job: Job) -> Result:
        self.begun.set()
        try:
            await self.may_end.wait()
        except asyncio.CancelledError:
            self.cancelled = True
            raise
        self.done.append(job)
        return TOLD


@pytest.fixture
def engine(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", ASK)
    monkeypatch.setenv("CACHEBLEND_STORE_KEY", STORE)
    engine = Doing()
    engine.may_end.set()
    yield engine
    engine.close()


async def post(http, body: str | bytes, key: str = STORE) -> Any:
    return await http.post(PATH, content=body, headers={"authorization": f"Bearer {key}"})


async def test_who_may_ask_looks_and_who_may_store_changes(engine, http):
    for job in JOBS:
        plain = job.model_dump_json()
        answer = await post(http, plain, ASK)
        assert (answer.status_code == 403) == (job.kind in CHANGES)
        if answer.is_error:
            assert f"to {job.kind}, the key in" in answer.json()["error"]["message"]
            answer = await post(http, plain)
        assert answer.json() == params_of(TOLD)["cacheblend"]
        assert engine.done[-1] == job
        assert (await post(http, plain, "guess")).status_code == 401
    assert len(engine.done) == len(JOBS)


@pytest.mark.parametrize("body", ["", "{", '{"kind": "steal"}', '{"kind": "report"}', "[" * 60])
async def test_a_malformed_job_is_one_line(engine, http, body):
    answer = await post(http, body)
    assert answer.status_code == 400
    assert "\n" not in answer.json()["error"]["message"]
    assert engine.done == []


async def test_a_client_that_hangs_up_cancels_its_job(engine, app):
    engine.may_end.clear()
    body = JOBS[0].model_dump_json().encode()
    caller = Caller(app, PATH, body, authorization=f"Bearer {STORE}")
    async with asyncio.timeout(20):
        await engine.begun.wait()
    await caller.hang_up()
    assert engine.cancelled
    assert engine.done == []
