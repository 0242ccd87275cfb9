"""Messages between the connector's two sides: jobs to the worker, results to the scheduler."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from cacheblend_rag.engines.found_chunk import FoundChunk
from cacheblend_rag.engines.vllm.connector.pace import Spans
from cacheblend_rag.engines.vllm.protocol.job import Compare, Job, Precompute
from cacheblend_rag.engines.vllm.protocol.result import BlendResult, Result, joined
from cacheblend_rag.settings import BlendConfig


@dataclass(frozen=True)
class Allotted:
    """One request's work with the blocks that the scheduler allocated.

    work: a job, or how the prompt is blended. chunks: that are blended, or compared. tokens: the
    whole prompt, or the job's. first, until: tokens [first, until) must be provided; those before
    are in the cache already. block_ids: the request's blocks in each KV cache group. arrived: when
    vLLM received the request, in seconds of ``time.time``. shared: tokens in the blocks before the
    first chunk, which ordinary requests may share. namespace: of its KV; None is the server's.
    """

    request_id: str
    work: Job | BlendConfig
    chunks: tuple[FoundChunk, ...]
    tokens: tuple[int, ...]
    first: int
    until: int
    block_ids: tuple[tuple[int, ...], ...]
    arrived: float = 0.0
    shared: int = 0
    namespace: str | None = None

    @property
    def is_blend(self) -> bool:
        """Whether a prompt is blended, into its own blocks."""
        return isinstance(self.work, BlendConfig)

    @property
    def waits(self) -> bool:
        """Whether it is only worked on while nothing else is."""
        return isinstance(self.work, Compare) or (
            isinstance(self.work, Precompute) and self.work.idle
        )

    @property
    def prefix(self) -> int:
        """Tokens before the first chunk that are in the cache already."""
        return min(self.first, self.shared)

    def blocks(self, size: int) -> tuple[int, ...]:
        """Return the blocks, of ``size`` tokens each, that must be filled in the only group."""
        (block_ids,) = self.block_ids
        return block_ids[self.first // size : -(-self.until // size)]


@dataclass
class StepJobs(KVConnectorMetadata):
    """From scheduler to worker: jobs to begin, and requests that ended.

    busy: whether other requests compute in this step, so that slices must be short. computed:
    tokens that vLLM computes itself, see ``computed_spans``. reset: whether vLLM has reset its
    connector since the last step, as it does when it loads other weights.
    """

    jobs: list[Allotted] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)
    busy: bool = False
    computed: Spans = ()
    reset: bool = False


@dataclass
class StepResults(KVConnectorWorkerMetadata):
    """From worker to scheduler: results by request. All ranks send the same requests' results."""

    results: dict[str, Result]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Join the results of another rank."""
        assert isinstance(other, StepResults)  # noqa: S101 (all ranks run this connector)
        for request_id, result in other.results.items():
            own = self.results.get(request_id)
            self.results[request_id] = result if own is None else joined(own, result)
        return self


def leaves_blocks_empty(result: Result, *, blends: bool) -> bool:
    """Whether a job left its blocks unfilled, so that vLLM must compute them."""
    return not (blends and isinstance(result, BlendResult) and result.reason is None)
