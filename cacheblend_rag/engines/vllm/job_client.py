"""Sends jobs to the connector, on every replica that must run them."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from cacheblend_rag.engines.sampling import ResolvedSampling
from cacheblend_rag.engines.vllm.protocol.job import (
    MOST_KEYS,
    SALT_PREFIX,
    BlendJob,
    Kind,
    SentChunk,
)
from cacheblend_rag.engines.vllm.protocol.result import (
    NO_CONNECTOR,
    NO_REPORT,
    ConnectorStatus,
    Declined,
    EvictResult,
    Failed,
    LookupResult,
    PrecomputeResult,
    ReleaseResult,
    Result,
    VerifyResult,
    result_of,
    status_of,
)
from cacheblend_rag.engines.vllm.transport import Transport, VLLMRequest
from cacheblend_rag.errors import EngineUnavailableError
from cacheblend_rag.kv.chunk_kv import KVKey
from cacheblend_rag.prefill.comparing import Compared
from cacheblend_rag.prefill.lead_in import LeadInId, PlacedChunk
from cacheblend_rag.prefill.precompute import DocumentPlan
from cacheblend_rag.reason import Reason
from cacheblend_rag.report import Evicted, PrecomputeReport
from cacheblend_rag.settings import BlendConfig

T = TypeVar("T")
ToldT = TypeVar("ToldT", bound=Result)


class JobClient:
    """Sends the jobs of one engine.

    status: the connector's; it says how many replicas there are, and whether they share a folder.
    """

    def __init__(self, transport: Transport, lead_in: LeadInId, status: ConnectorStatus) -> None:
        self._transport, self._lead_in, self.status = transport, lead_in, status

    async def precompute(self, work: DocumentPlan, *, idle: bool = False) -> Result:
        """Compute and store a document's chunks; idle: only while vLLM does nothing else.

        With a shared folder one replica computes for all.
        """
        chunks = tuple(
            SentChunk(
                start,
                start + len(plan.token_ids),
                plan.key.context_id,
                context_start=len(plan.lead),
                turn=plan.is_turn,
            )
            for plan, start in work.members
        )
        tokens = tuple(work.tokens)
        job = BlendJob(
            "precompute",
            self._lead_in,
            chunks,
            tokens=tokens,
            idle=idle,
        )
        return await self._carry_out(carrier(job), everywhere=not self.status.shared)

    async def compare(
        self, chunks: tuple[SentChunk, ...], compared: Compared, config: BlendConfig
    ) -> Result:
        """Compare a prompt with full prefill while vLLM does nothing else."""
        job = BlendJob(
            "compare",
            self._lead_in,
            chunks,
            tokens=tuple(compared.prompt),
            config=config,
            idle=True,
            answer=tuple(compared.answer),
            reference=tuple(compared.reference or ()),
        )
        return await self._carry_out(carrier(job), everywhere=False)

    async def verify(self, keys: Sequence[KVKey]) -> Mapping[KVKey, Reason]:
        """Check stored KV on all replicas; returns unreadable keys with reasons.

        Raises EngineUnavailableError when the connector fails.
        """
        lost = dict[str, Reason]()
        for request in self._by_keys("verify", keys):
            for result in await self._told(request, VerifyResult, "check the stored KV"):
                lost |= result.unreadable
        names = {f"{key.chunk_id}/{key.context_id}": key for key in keys}
        return {names[name]: why for name, why in lost.items() if name in names}

    async def lookup(self, keys: Sequence[KVKey]) -> list[bool | None]:
        """Return for each key whether it is stored, on all replicas that share no folder.

        None: one cannot tell, and no other lacks it. Raises EngineUnavailableError when the
        connector does not say.
        """
        stored: list[bool | None] = []
        for request in self._by_keys("lookup", keys):
            named = request.job.keys if request.job is not None else ()
            held, unknown = set(range(len(named))), set[int]()
            everywhere = not self.status.shared
            for result in await self._told(request, LookupResult, "look chunks up", everywhere):
                held &= {*result.found, *result.unknown}
                unknown |= set(result.unknown)
            stored += [
                None if index in held & unknown else index in held for index in range(len(named))
            ]
        return stored

    async def evict(self, keys: Sequence[KVKey], *, turns: bool = False) -> Evicted:
        """Drop KV on all replicas; returns how many keys were stored.

        turns: whether it is that of conversations. Raises EngineUnavailableError when the connector
        does not do it.
        """
        evicted = Evicted()
        for request in self._by_keys("evict", keys, turns=turns):
            results = await self._told(request, EvictResult, "evict KV")
            for result in results:
                evicted += Evicted(0, result.pending, is_noted=result.noted)
            evicted += max(result.evicted for result in results)
        return evicted

    async def prefetch(self, keys: Sequence[KVKey]) -> None:
        """Prefetch KV into the fastest tier on all replicas."""
        for request in self._by_keys("prefetch", keys):
            await self._carry_out(request, everywhere=True)

    async def release(self) -> int:
        """Free the memory of KV on all replicas; returns the total of bytes.

        Raises EngineUnavailableError when one fails.
        """
        job = carrier(BlendJob("release", self._lead_in))
        told = await self._told(job, ReleaseResult, "release the memory of chunk KV")
        return sum(result.released for result in told)

    async def late_result(self, report_id: str) -> Result | None:
        """Fetch the result of a finished request, from the replica that served it."""
        request = carrier(BlendJob("report", self._lead_in, report_id=report_id))
        answers = [result_of(one) for one in await self._params(self._to_replicas(request))]
        told = [answer for answer in answers if answer != NO_REPORT]
        return (told or answers)[0]

    def _by_keys(
        self, kind: Kind, keys: Sequence[KVKey], *, turns: bool = False
    ) -> Iterator[VLLMRequest]:
        named = [(key.chunk_id, key.context_id) for key in keys]
        for start in range(0, len(named), MOST_KEYS):
            some = tuple(named[start : start + MOST_KEYS])
            yield carrier(BlendJob(kind, self._lead_in, keys=some, turns=turns))

    async def _carry_out(self, request: VLLMRequest, *, everywhere: bool) -> Result:
        """Send a request that only carries a job; returns the connector's result.

        everywhere: to each replica; a failure, or the result with most changes, is returned.
        """
        results = await self._outcomes(request, everywhere)
        failed = [result for result in results if isinstance(result, Failed)]
        return failed[0] if failed else max(results, key=_done)

    async def _told(
        self, request: VLLMRequest, kind: type[ToldT], what: str, everywhere: bool = True
    ) -> list[ToldT]:
        """Return the results of a kind; raises EngineUnavailableError when another one comes."""
        told = list[ToldT]()
        for result in await self._outcomes(request, everywhere):
            if not isinstance(result, kind):
                why: str = result.error if isinstance(result, Failed) else "no result came"
                raise EngineUnavailableError(f"vLLM did not {what}: {why}")
            told.append(result)
        return told

    async def _outcomes(self, request: VLLMRequest, everywhere: bool) -> list[Result]:
        """Send a request that only carries a job, to each replica or to one."""
        asked = self._to_replicas(request) if everywhere else [request]
        return [_outcome(params) for params in await self._params(asked)]

    def _to_replicas(self, request: VLLMRequest) -> list[VLLMRequest]:
        """Return the request for each replica."""
        if self.status.replicas == 1:
            return [request]
        return [replace(request, replica=index) for index in range(self.status.replicas)]

    async def _params(self, asked: Sequence[VLLMRequest]) -> list[Mapping[str, Any] | None]:
        return await all_of(params_of_last(self._transport, one) for one in asked)


def ask_status(transport: Transport) -> ConnectorStatus:
    """Return the connector's status."""
    asked = carrier(BlendJob("status", LeadInId("none", "", 0)))
    return status_of(transport.run(params_of_last(transport, asked)))


def sent_chunk(chunk: PlacedChunk) -> SentChunk:
    """Return a chunk of a prompt, or a part of a conversation, as jobs name it."""
    return SentChunk(
        chunk.start,
        chunk.end,
        chunk.key.context_id,
        chunk.protected,
        before=chunk.before,
        after=chunk.after,
        turn=chunk.is_turn,
        exact=chunk.is_exact,
    )


async def params_of_last(transport: Transport, request: VLLMRequest) -> Mapping[str, Any] | None:
    """Send a request; returns the connector's parameters in its last piece."""
    params: Mapping[str, Any] | None = None
    async for piece in transport.send(request, stream=False):
        params = piece.params or params
    return params


def carrier(job: BlendJob) -> VLLMRequest:
    """Return a request that carries a job; its prompt is any two tokens."""
    sampling = ResolvedSampling(max_tokens=2, ignore_eos=True)
    salt = f"{SALT_PREFIX}{uuid.uuid4().hex}"
    return VLLMRequest((0, 0), sampling, salt, job)


async def all_of(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Await all; if one fails, the others are cancelled."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def stored_by(result: Result, run: DocumentPlan) -> PrecomputeReport:
    """Return the results of the chunks of a run."""
    match result:
        case PrecomputeResult():
            return PrecomputeReport(
                result.computed,
                result.skipped,
                result.computed_tokens,
                refused=result.refused,
                failed=result.failed,
            )
        case Failed(error=why):
            failed = {why: len(run.members)}
            return PrecomputeReport(refused=failed, failed=failed)
        case _:
            return PrecomputeReport()


def _outcome(params: Mapping[str, Any] | None) -> Result:
    """Return the connector's result of a job; Failed if there is none."""
    result = result_of(params)
    if result is None:
        return Failed(NO_CONNECTOR)
    return Failed(result.reason) if isinstance(result, Declined) else result


def _done(result: Result) -> int:
    """Return how many chunks a job has changed in a replica's store."""
    return result.computed if isinstance(result, PrecomputeResult) else 0
