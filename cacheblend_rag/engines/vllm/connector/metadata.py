"""What travels between the connector's two sides: jobs to the worker, results to the scheduler."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from cacheblend_rag.engines.vllm.connector.prefill_timer import Spans
from cacheblend_rag.engines.vllm.protocol import (
    BlendJob,
    Declined,
    Failed,
    PrecomputeResult,
    ReleaseResult,
    Result,
)
from cacheblend_rag.reason import Reason, ReasonCode

RANK_FAILED = Failed(Reason(ReasonCode.FAILED, "blending failed on another rank"))


@dataclass(frozen=True)
class Allotted:
    """One request's job with what the scheduler allotted to it.

    tokens: the whole prompt. first, until: its tokens [first, until) are to be provided; those
    before stand in the cache already. block_ids: the request's blocks. wait: it is needed in this
    step. arrived: when vLLM was handed the request, in seconds of ``time.time``.
    """

    request_id: str
    job: BlendJob
    tokens: tuple[int, ...]
    first: int
    until: int
    block_ids: tuple[int, ...]
    wait: bool = False
    arrived: float = 0.0

    def blocks(self, size: int) -> tuple[int, ...]:
        """Return the blocks, of ``size`` tokens each, that are to be filled."""
        return self.block_ids[self.first // size : -(-self.until // size)]


@dataclass
class StepJobs(KVConnectorMetadata):
    """From scheduler to worker: jobs to begin, and requests that are gone.

    busy: others compute in this step, so asynchronous work must leave them time. computed: what
    vLLM computes itself, see ``computed_spans``.
    """

    jobs: list[Allotted] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)
    busy: bool = False
    computed: Spans = ()


@dataclass
class StepResults(KVConnectorWorkerMetadata):
    """From worker to scheduler: results by request. All ranks send the same requests' results."""

    results: dict[str, Result]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Keep the first rank's results, unless another one's says what went wrong.

        What ranks have released adds up.
        """
        assert isinstance(other, StepResults)  # noqa: S101 (all ranks run this connector)
        for request_id, result in other.results.items():
            mine = self.results.get(request_id, RANK_FAILED)
            if isinstance(mine, ReleaseResult) and isinstance(result, ReleaseResult):
                self.results[request_id] = replace(mine, released=mine.released + result.released)
            if _is_elsewhere(mine) or _stored(result) < _stored(mine):
                self.results[request_id] = result
        return self


def leaves_blocks_empty(result: Result, *, blends: bool) -> bool:
    """Whether the blocks a job was to fill are left to vLLM: they hold other requests' KV still."""
    return not blends or isinstance(result, Failed | Declined)


def _is_elsewhere(result: Result) -> bool:
    """Whether what went wrong did so on another rank."""
    return isinstance(result, Failed) and result.error == RANK_FAILED.error


def _stored(result: Result) -> int:
    """Chunks a rank has stored: a chunk is stored once all ranks have their part of it."""
    return result.computed if isinstance(result, PrecomputeResult) else 0
