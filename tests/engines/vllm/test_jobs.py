"""To which replicas a job is sent, and what the results of several are together."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cacheblend_rag import BlendConfig, StoreConfig
from cacheblend_rag.engines.vllm.connector.settings import ConnectorSettings
from cacheblend_rag.engines.vllm.in_process import carry_out
from cacheblend_rag.engines.vllm.protocol.job import (
    Ask,
    Compare,
    Job,
    Precompute,
    StoreJob,
    read_job,
)
from cacheblend_rag.engines.vllm.protocol.result import (
    NO_CONNECTOR,
    NO_REPORT,
    BlendResult,
    EvictResult,
    Failed,
    LookupResult,
    PrecomputeResult,
    ReleaseResult,
    Result,
    VerifyResult,
)
from cacheblend_rag.engines.vllm.transport import VLLMRequest
from cacheblend_rag.kv.chunk_kv import chunk_id
from cacheblend_rag.prefill.lead_in import LeadInId
from cacheblend_rag.reason import Reason, ReasonCode

LEAD_IN = LeadInId("none", chunk_id(()), 0)
WHY = Reason(ReasonCode.NO_ROOM, "no memory")
PRECOMPUTE = Precompute(lead_in=LEAD_IN, tokens=(1, 2), chunks=((0, 2),))
COMPARE = Compare(tokens=(1,), answer=(2,), config=BlendConfig())
REPORT = Ask(kind="report", report_id="0" * 32)
TWO = ConnectorSettings().with_changes(replicas=2)


def store(kind: Any) -> StoreJob:
    return StoreJob(kind=kind, lead_in=LEAD_IN, keys=())


def done(
    job: Job, results: Sequence[Result | None], settings: ConnectorSettings = TWO
) -> tuple[Result, list[int | None]]:
    """Return the result of a job, and the replicas it was sent to; results: those of each."""
    sent: list[int | None] = []

    async def send(request: VLLMRequest) -> Result | None:
        assert request.job is not None
        assert read_job(request.job) == job
        sent.append(request.replica)
        return results[request.replica or 0]

    return asyncio.run(carry_out(job, settings, send)), sent


@pytest.mark.parametrize(
    ("job", "results", "told"),
    [
        (
            store("lookup"),
            (LookupResult((0, 1), unknown=(3,)), LookupResult((1, 3), unknown=(2,))),
            LookupResult((1,), unknown=(3,)),
        ),
        (
            store("verify"),
            (VerifyResult(2, {"a": WHY}), VerifyResult(2, {"b": WHY})),
            VerifyResult(2, {"a": WHY, "b": WHY}),
        ),
        (
            store("evict"),
            (EvictResult(1, ("disk",)), EvictResult(2, ("disk", "s3"), noted=False)),
            EvictResult(2, ("disk", "s3"), noted=False),
        ),
        (Ask(kind="release"), (ReleaseResult(1), ReleaseResult(2)), ReleaseResult(3)),
        (PRECOMPUTE, (PrecomputeResult(0, 1), PrecomputeResult(1)), PrecomputeResult(1)),
        (PRECOMPUTE, (PrecomputeResult(1), Failed(WHY)), Failed(WHY)),
        (PRECOMPUTE, (PrecomputeResult(1), None), Failed(NO_CONNECTOR)),
        (REPORT, (NO_REPORT, BlendResult()), BlendResult()),
        (REPORT, (None, NO_REPORT), NO_REPORT),
    ],
)
def test_all_replicas_have_what_is_told(
    job: Job, results: Sequence[Result | None], told: Result
) -> None:
    assert done(job, results) == (told, [0, 1])


def test_one_replica_does_what_it_can_do_for_all(tmp_path: Path) -> None:
    for job in (COMPARE, Ask(kind="status")):
        assert done(job, [Failed(WHY)])[1] == [None]
    shared = TWO.with_changes(store=StoreConfig(kv_path=tmp_path))
    for job in (PRECOMPUTE, store("lookup")):
        assert done(job, [Failed(WHY)], shared)[1] == [None]
    assert done(store("evict"), [EvictResult(1), EvictResult(1)], shared)[1] == [0, 1]
    assert done(PRECOMPUTE, [PrecomputeResult(1)], ConnectorSettings())[1] == [None]


def test_a_job_that_is_cancelled_is_cancelled_everywhere() -> None:
    ended: list[int | None] = []

    async def send(request: VLLMRequest) -> Result | None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(request.replica)
        return None

    async def main() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(carry_out(PRECOMPUTE, TWO, send), 0.05)
        await asyncio.sleep(0)
        assert ended == [0, 1]

    asyncio.run(main())
