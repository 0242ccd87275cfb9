"""Has jobs done by a vLLM in this process: on which replicas, and one result of all of theirs."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import reduce
from typing import TYPE_CHECKING

from cacheblend_rag.engines.sampling import ResolvedSampling
from cacheblend_rag.engines.vllm.protocol.job import SALT_PREFIX, Job
from cacheblend_rag.engines.vllm.protocol.result import (
    NO_CONNECTOR,
    NO_REPORT,
    Declined,
    EvictResult,
    Failed,
    LookupResult,
    PrecomputeResult,
    ReleaseResult,
    Result,
    VerifyResult,
)
from cacheblend_rag.engines.vllm.transport import VLLMRequest

if TYPE_CHECKING:
    from cacheblend_rag.engines.vllm.connector.settings import ConnectorSettings

BY_ONE = frozenset({"compare", "status"})
"""Kinds that any replica does for all."""
BY_ONE_IF_SHARED = frozenset({"precompute", "lookup"})
"""Kinds that one does for all if they keep chunk KV in one place."""

Send = Callable[[VLLMRequest], Awaitable[Result | None]]
"""Sends a request, and returns the connector's result."""


async def carry_out(job: Job, settings: ConnectorSettings, send: Send) -> Result:
    """Have a job done by each replica that must do it.

    Args:
        job: what is to be done.
        settings: of the connector.
        send: sends a request to vLLM.

    Returns:
        One result of all: the first failure; stored is what all have, evicted what any had.
    """
    by_one = job.kind in BY_ONE or (job.kind in BY_ONE_IF_SHARED and settings.store.outlives)
    replicas = [None] if by_one or settings.replicas == 1 else range(settings.replicas)
    tasks = [asyncio.ensure_future(send(carrier(job, replica))) for replica in replicas]
    try:
        results = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    if job.kind == "report":
        return next((one for one in results if one not in (None, NO_REPORT)), NO_REPORT)
    told = [_told(one) for one in results]
    return next((one for one in told if isinstance(one, Failed)), None) or reduce(_both, told)


def carrier(job: Job, replica: int | None = None) -> VLLMRequest:
    """Return a request that carries a job to the connector; its prompt is any two tokens."""
    return VLLMRequest(
        (0, 0),
        ResolvedSampling(max_tokens=2, ignore_eos=True),
        f"{SALT_PREFIX}{uuid.uuid4().hex}",
        replica=replica,
        job=job.model_dump_json(),
    )


def _told(result: Result | None) -> Result:
    if result is None:
        return Failed(NO_CONNECTOR)
    return Failed(result.reason) if isinstance(result, Declined) else result


def _both(one: Result, other: Result) -> Result:
    """Return the result of two replicas."""
    match one, other:
        case LookupResult(), LookupResult():
            known = [{*each.found, *each.unknown} for each in (one, other)]
            there = sorted(known[0] & known[1])
            unknown = {*one.unknown, *other.unknown}
            return LookupResult(
                tuple(each for each in there if each not in unknown),
                unknown=tuple(each for each in there if each in unknown),
            )
        case VerifyResult(), VerifyResult():
            return replace(one, unreadable={**one.unreadable, **other.unreadable})
        case EvictResult(), EvictResult():
            pending = tuple(dict.fromkeys((*one.pending, *other.pending)))
            most = max(one.evicted, other.evicted)
            return EvictResult(most, pending=pending, noted=one.noted and other.noted)
        case ReleaseResult(), ReleaseResult():
            return ReleaseResult(one.released + other.released)
        case PrecomputeResult(), PrecomputeResult():
            return max(one, other, key=lambda each: each.computed)
        case _:
            return one
