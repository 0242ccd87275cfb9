"""A worker whose store is only read refuses what would change it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cacheblend_rag import TieredKVStore
from cacheblend_rag.engines.vllm.connector.job_runner import JobRunner, verify
from cacheblend_rag.engines.vllm.protocol.job import Ask, Job, Precompute, StoreJob
from cacheblend_rag.engines.vllm.protocol.result import Failed, VerifyResult
from cacheblend_rag.kv.stored_chunk import READ_ONLY
from cacheblend_rag.kv.tiers import disk
from cacheblend_rag.prefill.lead_in import LeadInId
from tests.kv.samples import make_key, make_kv
from tests.prefill.prompts import run


def test_a_job_reads_stored_kv_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is damaged is not stored any more; what cannot be read is named."""
    keys = [make_key(number) for number in range(3)]
    with TieredKVStore.open(host_bytes=0, kv_path=tmp_path) as store:
        for number, key in enumerate(keys[:2]):
            store.put(key, make_kv(number))
        damaged = next(tmp_path.glob(f"??/{keys[0]}*"))
        damaged.write_bytes(damaged.read_bytes()[:-9])
        assert run(verify(store, keys)) == VerifyResult(3)
        assert store.contains_many(keys) == [False, True, False]

        def broken(*_: object, **__: object) -> None:
            raise OSError("no such device")

        monkeypatch.setattr(disk, "read_range", broken)
        name = f"{keys[1].chunk_id}/{keys[1].context_id}"
        assert run(verify(store, keys)) == VerifyResult(3, {name: "disk tier: store error"})


LEAD_IN = LeadInId("none", "", 0)


@pytest.mark.parametrize(
    "job",
    [
        StoreJob(kind="evict", lead_in=LEAD_IN, keys=((make_key(1).chunk_id, ""),)),
        Precompute(lead_in=LEAD_IN, tokens=(1, 2), chunks=((0, 2),)),
        Ask(kind="release"),
    ],
    ids=lambda job: job.kind,
)
def test_jobs_that_change_the_store_are_refused(job: Job, tmp_path: Path) -> None:
    key = make_key(1)
    with TieredKVStore.open(host_bytes=0, kv_path=tmp_path) as writer:
        writer.put(key, make_kv(1))
        with TieredKVStore.open(kv_path=tmp_path, read_only=True) as store:
            nothing = cast("Any", None)
            jobs = JobRunner(nothing, nothing, store, namespace="default")
            with pytest.raises(StopIteration) as ended:
                next(jobs.work(cast("Any", SimpleNamespace(work=job)), nothing))
        assert ended.value.value == Failed(READ_ONLY)
        assert writer.contains(key)
