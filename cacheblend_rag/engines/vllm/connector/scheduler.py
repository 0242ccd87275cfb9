"""The scheduler side of the connector.

It reads the jobs in requests, promises the tokens that the worker will provide, and returns
results with the requests' last outputs, or on request.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from vllm.v1.request import RequestStatus

from cacheblend_rag.engines.vllm.connector.finding import Finding, malformed
from cacheblend_rag.engines.vllm.connector.metadata import Allotted, StepJobs, leaves_blocks_empty
from cacheblend_rag.engines.vllm.connector.metrics import BlendStats
from cacheblend_rag.engines.vllm.connector.pace import computed_spans
from cacheblend_rag.engines.vllm.connector.pending import Blend, Pending
from cacheblend_rag.engines.vllm.connector.prefix import (
    IsCached,
    held_plainly,
    held_report,
    held_result,
    is_held,
    set_apart,
    tell_reused,
    undo,
)
from cacheblend_rag.engines.vllm.namespaces import NO_NAMESPACE, block_mark, job_of
from cacheblend_rag.engines.vllm.protocol.job import Ask, Compare, Job, Precompute, read_job
from cacheblend_rag.engines.vllm.protocol.result import (
    CANCELLED,
    NO_REPORT,
    BlendResult,
    CompareResult,
    Failed,
    Late,
    PrecomputeResult,
    Result,
    params_of,
)
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.kv.chunk_kv import chunk_id
from cacheblend_rag.prefill.prompt_pass import ALL_EXACT
from cacheblend_rag.reason import Reason, ReasonCode
from cacheblend_rag.report import PREFIX_CACHE

if TYPE_CHECKING:
    from vllm.config import ModelConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

CARRIER_TOKENS = 2
"""Tokens after which a request that only carries a job ends; results may take as many."""
KEPT_REPORTS = 1024
"""Results kept for ``report`` jobs, and as many for repeats of a blend."""
KEPT_TRACES = 16
"""Kept results that have a trace: it takes much more memory than the rest of a result."""
CACHED = Reason(
    ReasonCode.PREFIX_CACHED,
    "vLLM's prefix cache holds all that this prompt would reuse, but for less than a block",
)


class ConnectorScheduler:
    """Reads the jobs in requests, reserves their tokens, and returns their results.

    refusal: why nothing is blended here, or None. block_size: tokens a block of vLLM's cache.
    kept_tokens: how long a prompt may be, up to its last chunk, to have blocks for all of its
    tokens; longer ones share none, since the pass could not read them. None is without limit.
    finding: makes jobs of requests that bring none. is_cached: whether vLLM's prefix cache has a
    block of a hash.
    """

    def __init__(
        self,
        model: ModelConfig,
        refusal: Reason | None,
        *,
        block_size: int,
        kept_tokens: int | None = None,
        finding: Finding,
    ) -> None:
        self.finding, self.is_cached = finding, cast("IsCached", lambda _: False)
        self._block_size = block_size
        self._kept_tokens = math.inf if kept_tokens is None else kept_tokens
        self.pending: dict[str, Pending] = {}
        self.late: dict[str, Pending] = {}
        self.reports: OrderedDict[str, Result] = OrderedDict()
        self._model, self._refusal = model, refusal
        self._blended: OrderedDict[str, BlendResult] = OrderedDict()
        self._traced: deque[str] = deque()
        self._stats = BlendStats()
        self._at_work: dict[str, Request] = {}
        self._new: list[Allotted] = []
        self._gone: list[str] = []
        self._is_reset = False

    def add(self, request: Request) -> None:
        """Read a new request's job, or find chunks in its prompt.

        A blend's blocks are set apart before vLLM looks the request up.
        """
        pending = self._read(request)
        self.pending[request.request_id] = pending
        if (blend := pending.blend) is None:
            return
        # vLLM's own blocks with these tokens are exact; they are found before others are set apart.
        if blend.config.reuse_prefix and not blend.config.trace:
            held = held_plainly(request, self.is_cached, self._block_size)
            pending.may_go_on = self._is_held(request, blend, held)
        if not pending.may_go_on:
            self._set_apart(request, pending, blend)

    def _is_held(self, request: Request, blend: Blend, computed: int) -> bool:
        return is_held(blend.chunks, request.num_prompt_tokens, computed, self._block_size)

    def _read(self, request: Request) -> Pending:
        """Return the state of a new request, for its own namespace."""
        tenants = self.finding.tenants
        namespace = tenants.namespace_of(request)
        if tenants.are_told_apart:  # a namespace's requests share blocks with each other only
            set_apart(request, 0, self._block_size, block_mark(namespace))
        sent = job_of(request)
        if sent is not None:
            pending = read_pending(sent, self._refusal, self._model)
        else:
            pending = self.finding.pending(request, self._refusal, self._stats)
        if namespace is None and (pending.job or pending.blend or pending.reason):
            pending = Pending(reason=NO_NAMESPACE, answers=pending.answers)
        pending.request, pending.namespace = request, namespace
        if pending.report_id and namespace != tenants.own:
            pending.report_id = f"{pending.report_id} {namespace}"
        return pending

    def _set_apart(self, request: Request, pending: Pending, blend: Blend) -> None:
        """Set a blend's blocks apart: all of them, or those from its first chunk on."""
        pending.salt = request.cache_salt
        if blend.config.reuse_prefix and blend.chunks[-1].end <= self._kept_tokens:
            pending.shared_by = [
                set_apart(request, one.start, self._block_size, one.mark)
                for one in pending.stretches
            ]
        else:
            set_apart(request, 0, self._block_size, pending.mark)

    def promise(self, request: Request, computed: int) -> tuple[int | None, bool]:
        """Return how many tokens after the computed ones will be provided, between steps if any.

        They end at the prompt's last chunk, or there are none; None makes a request wait a step.
        """
        pending = self.pending.get(request.request_id)
        if pending is not None and pending.is_last:
            is_busy = not all(other.is_last for other in self.pending.values())
            return (None if is_busy else 0), False
        if pending is None or (pending.blend is None and pending.job is None):
            return 0, False
        if pending.blend is not None:
            return self._promise_blend(request, pending, pending.blend, computed)
        request.max_tokens = min(request.max_tokens, CARRIER_TOKENS)
        if isinstance(pending.job, Ask) and pending.job.kind == "report":
            return 0, False
        pending.tokens = 1
        return 1 - computed, computed < 1

    def _promise_blend(
        self, request: Request, pending: Pending, blend: Blend, computed: int
    ) -> tuple[int | None, bool]:
        tokens = blend.chunks[-1].end
        if pending.may_go_on:
            if self._is_held(request, blend, computed):
                pending.result = held_result(blend.chunks, computed, ALL_EXACT)
                return 0, False
            pending.may_go_on = False
            self._set_apart(request, pending, blend)
        pending.leave_out(computed)
        pending.cached = tuple(map(held_report, blend.chunks[: pending.left_out]))
        work = _work_of(request, pending.mark, tokens)
        if self._is_cached(pending, tokens, computed):
            if pending.result is None and work in self._blended:
                pending.result = _repeated(self._blended[work], pending.shared)
            elif pending.result is None:
                pending.cached = ()
                pending.result = held_result(blend.chunks, computed, CACHED)
            return 0, False
        if self._is_under_way(work, request):
            return None, False
        if pending.lacks_earlier:
            self._begin_anew(request, pending, blend)
            return None, False
        pending.tokens, pending.work = tokens, work
        return tokens - computed, True

    def _is_cached(self, pending: Pending, tokens: int, computed: int) -> bool:
        """Whether vLLM's prefix cache has all that would be blended.

        Of what was blended before, only an incomplete last block is missing: vLLM computes it.
        """
        return tokens - computed < (self._block_size if computed > pending.shared else 1)

    def _is_under_way(self, work: str, request: Request) -> bool:
        """Whether a prompt with found chunks is being blended for another request already."""
        other = self._at_work.get(work)
        if other is None or other is request:
            return False
        return bool(other.status == RequestStatus.WAITING_FOR_REMOTE_KVS)

    def _begin_anew(self, request: Request, pending: Pending, blend: Blend) -> None:
        """Set a prompt's blocks apart as its own: those of the one that it continues are gone.

        vLLM looks it up again in the next step.
        """
        undo(request, pending.salt)
        pending.stretches = self.finding.stretches(request, blend, anew=True)
        self._set_apart(request, pending, blend)

    def allot(self, request: Request, blocks: KVCacheBlocks, promised: int) -> None:
        """Queue the job of a request whose blocks were allocated."""
        pending = self.pending.get(request.request_id)
        if pending is None or promised == 0:
            return
        job, blend, prompt = pending.job, pending.blend, tuple(request.prompt_token_ids)
        work = job if blend is None else blend.config
        if work is None:
            return
        chunks, tokens = pending.work_found, prompt
        if isinstance(job, Compare) and pending.namespace is not None:
            chunks = self.finding.compared(pending.namespace, job)
        if isinstance(job, Compare | Precompute):
            tokens = job.tokens
        pending.sent, pending.result, pending.first = False, None, pending.tokens - promised
        if blend is not None:
            self._at_work[pending.work] = request
            tell_reused(request, None, pending.first)
        self._new.append(
            Allotted(
                request_id=request.request_id,
                work=work,
                chunks=chunks,
                tokens=tokens,
                first=pending.first,
                until=pending.tokens,
                block_ids=tuple(map(tuple, blocks.get_block_ids())),
                arrived=request.arrival_time,
                shared=pending.shared,
                namespace=pending.namespace,
            )
        )

    def take_jobs(self, step: SchedulerOutput) -> StepJobs:
        """Return the queued jobs for the worker in this step."""
        busy = step.total_num_scheduled_tokens > 0
        jobs = StepJobs(self._new, self._gone, busy, computed_spans(step), self._is_reset)
        for allotted in self._new:
            self.pending[allotted.request_id].sent = True
        self._new, self._gone, self._is_reset = [], [], False
        return jobs

    def reset(self) -> None:
        """Have the worker look at the model's weights: KV of others is no longer found."""
        self._is_reset = True

    def note_results(self, results: Mapping[str, Result]) -> None:
        """Receive results, by request."""
        for request_id, result in results.items():
            late = self.late.pop(request_id, None)
            if late is not None:
                self.finding.note_result(late, result)
                self._concluded(late, result)
            pending = self.pending.get(request_id)
            if pending is None:
                continue
            pending.result = result
            self.finding.note_result(pending, result)
            blends = pending.blend is not None
            if blends and pending.request is not None:
                tell_reused(pending.request, result, pending.first)
            if leaves_blocks_empty(result, blends=blends):  # vLLM's: promise none again
                pending.share_all()
                pending.job = pending.blend = None

    def finish(self, request: Request) -> dict[str, Any] | None:
        """Return the result for the last output of a request with a job."""
        pending = self.pending.pop(request.request_id, None)
        self._new = [new for new in self._new if new.request_id != request.request_id]
        if pending is None:
            return None
        if self._at_work.get(pending.work) is request:
            del self._at_work[pending.work]
        if isinstance(pending.job, Ask) and pending.job.kind == "report":
            return params_of(self.reports.pop(pending.report_id, NO_REPORT))
        if pending.sent and pending.result is None:
            self._gone.append(request.request_id)
            self.late[request.request_id] = pending
            return params_of(Late()) if pending.answers else None
        result = pending.result
        if result is None and pending.reason is not None:
            is_job = job_of(request) is not None
            result = Failed(pending.reason) if is_job else BlendResult(pending.reason)
        if result is None:
            return None
        if isinstance(result, PrecomputeResult):
            self.finding.finder.settle(0.1)
        result = self._concluded(pending, result)
        return params_of(result) if pending.answers else None

    def _concluded(self, pending: Pending, result: Result) -> Result:
        """Count a finished request's result, and return it with the chunks that were left out.

        It is kept for a later ``report``, and the oldest one is dropped.
        """
        if isinstance(result, CompareResult) or (pending.counts and result != CANCELLED):
            self._stats.record(result)
        if pending.work and isinstance(result, BlendResult):
            _keep(self._blended, pending.work, replace(result, trace=None))
        if pending.cached and isinstance(result, BlendResult):
            result = replace(result, chunks=(*pending.cached, *result.chunks))
        if pending.report_id:
            _keep(self.reports, pending.report_id, result)
            if isinstance(result, BlendResult) and result.trace is not None:
                self.note_traced(pending.report_id)
        return result

    def note_traced(self, report_id: str) -> None:
        """Record that a kept report has a trace, and drop the oldest trace if there are many."""
        self._traced.append(report_id)
        if len(self._traced) > KEPT_TRACES:
            oldest = self._traced.popleft()
            kept = self.reports.get(oldest)
            if isinstance(kept, BlendResult):
                self.reports[oldest] = replace(kept, trace=None)

    def take_stats(self) -> BlendStats | None:
        """Return the counts since the last call."""
        if self._stats.is_empty():
            return None
        stats, self._stats = self._stats, BlendStats()
        return stats


def _keep(results: OrderedDict[str, Any], name: str, result: Result) -> None:
    """Keep a result, and drop the oldest one if there are many."""
    results[name] = result
    if len(results) > KEPT_REPORTS:
        results.popitem(last=False)


def _work_of(request: Request, mark: str, tokens: int) -> str:
    """Name the blend of a request's first ``tokens`` tokens: vLLM shares its blocks under it."""
    return f"{request.cache_salt} {mark} {chunk_id(request.prompt_token_ids[:tokens])}"


def _repeated(result: BlendResult, prefix: int) -> BlendResult:
    """Return the result of a blend whose KV was still in vLLM's prefix cache."""
    return replace(
        result,
        prefix_tokens=prefix,
        compute_share=0.0,
        seconds={},
        starts={},
        load_by_tier={},
        work_seconds=0.0,
        chunks=tuple(
            replace(chunk, recomputed=0, tier=PREFIX_CACHE) if chunk.hit else chunk
            for chunk in result.chunks
        ),
    )


def read_pending(sent: str, refusal: Reason | None, model: ModelConfig) -> Pending:
    """Return the state of a request that brings a job, as JSON; or why that is not done."""
    try:
        job = read_job(sent)
        _check_tokens(job, model.max_model_len, model.get_vocab_size())
    except Exception as error:  # whatever it is, it must end this request's work and no other's
        return Pending(reason=malformed(error))
    if isinstance(job, Ask) and job.kind != "release":
        return Pending(job=job, report_id=job.report_id)
    return Pending(job=job) if refusal is None else Pending(reason=refusal)


def _check_tokens(job: Job, longest: int, vocabulary: int) -> None:
    """Raise ConfigError unless a job's tokens are the model's, and fit its context window."""
    if not isinstance(job, Compare | Precompute):
        return
    reference, answer = (job.reference, job.answer) if isinstance(job, Compare) else ((), ())
    most = max(len(job.tokens), len(reference)) + len(answer)
    if most > longest or max((*job.tokens, *reference, *answer)) >= vocabulary:
        raise ConfigError("tokens exceed the model's context or vocabulary")
