"""A worker whose store is only read refuses what would change it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cacheblend_rag import TieredKVStore
from cacheblend_rag.engines.vllm.connector.jobs import Jobs
from cacheblend_rag.engines.vllm.protocol import BlendJob, Failed, SentLeadIn
from cacheblend_rag.kv.store import READ_ONLY
from tests.kv.samples import make_key, make_kv


@pytest.mark.parametrize("kind", ["evict", "precompute"])
def test_jobs_that_change_the_store_are_refused(kind: Any, tmp_path: Path) -> None:
    key = make_key(1)
    with TieredKVStore.open(host_bytes=0, disk_path=tmp_path) as writer:
        writer.put(key, make_kv(1))
        with TieredKVStore.open(disk_path=tmp_path, read_only=True) as store:
            nothing = cast("Any", None)
            jobs = Jobs(nothing, nothing, store, namespace="default", mode="auto")
            job = BlendJob(kind, SentLeadIn("none", "", 0), keys=((key.chunk_id, ""),))
            with pytest.raises(StopIteration) as ended:
                next(jobs.work(cast("Any", SimpleNamespace(job=job)), nothing))
        assert ended.value.value == Failed(READ_ONLY)
        assert writer.contains(key)
