"""An out-of-tree KV connector that runs CacheBlend in unpatched vLLM.

To vLLM, blending is an external KV load: the scheduler side says how many tokens of a
request it will provide, the worker side computes them into the request's blocks. A job
comes with the request (``kv_transfer_params``), a result goes back with its last output.

A blend's blocks have hashes of their own from the first one on that holds chunk KV:
otherwise vLLM's prefix cache would serve approximate KV to ordinary requests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm import __version__ as vllm_version
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from cacheblend_rag.engines.vllm.connector.compatibility import (
    FAILS_REQUESTS,
    kept_tokens,
    refusal_of,
)
from cacheblend_rag.engines.vllm.connector.finding import Finding
from cacheblend_rag.engines.vllm.connector.metadata import StepJobs, StepResults
from cacheblend_rag.engines.vllm.connector.metrics import BlendPromMetrics, BlendStats
from cacheblend_rag.engines.vllm.connector.scheduler import ConnectorScheduler
from cacheblend_rag.engines.vllm.connector.settings import ConnectorSettings
from cacheblend_rag.engines.vllm.connector.worker import ConnectorWorker
from cacheblend_rag.engines.vllm.versions import check_version

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

if not FAILS_REQUESTS:  # failed loads of several KV cache groups could not be told: vLLM makes one
    SupportsHMA = object


class CacheBlendConnector(KVConnectorBase_V1, SupportsHMA):
    """The class that vLLM loads, once beside its scheduler and once in each worker.

    Each method belongs to one of the two sides; see ConnectorScheduler and ConnectorWorker.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        check_version(vllm_version)
        super().__init__(vllm_config, role, kv_cache_config)
        settings = ConnectorSettings.of_vllm(vllm_config)
        refusal = refusal_of(vllm_config, kv_cache_config)
        block_size = vllm_config.cache_config.block_size
        self._scheduler: ConnectorScheduler | None = None
        self._worker: ConnectorWorker | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = ConnectorScheduler(
                vllm_config.model_config,
                refusal,
                block_size=block_size,
                kept_tokens=kept_tokens(kv_cache_config, block_size),
                finding=Finding.of(vllm_config, settings),
            )
        else:
            self._worker = ConnectorWorker(vllm_config, kv_cache_config, settings, refusal)

    @property
    def scheduler(self) -> ConnectorScheduler:
        """The scheduler side; only beside a scheduler."""
        assert self._scheduler is not None  # noqa: S101 (vLLM asks each side for its own)
        return self._scheduler

    @property
    def worker(self) -> ConnectorWorker:
        """The worker side; only in a worker."""
        assert self._worker is not None  # noqa: S101 (vLLM asks each side for its own)
        return self._worker

    @property
    def requires_kv_delivery(self) -> bool:
        """No other instance waits for KV from here, so a preempted request keeps its output."""
        return False

    # Worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Get ready to blend; a model that cannot be blended is served by ordinary prefill."""
        self.worker.get_ready()

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Receive a step's metadata, before jobs or the model run."""
        super().bind_connector_metadata(connector_metadata)
        if isinstance(connector_metadata, StepJobs):
            self.worker.begin_step(connector_metadata)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Run jobs for a slice of time."""
        step = self._get_connector_metadata()
        if isinstance(step, StepJobs):
            self.worker.work(step)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: KV is there before the first layer runs."""

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to save: separate jobs compute chunk KV."""

    def wait_for_save(self) -> None:
        """End the worker's step; there is no save to wait for."""
        self.worker.end_step()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return requests whose asynchronous work is done."""
        return None, self.worker.take_done()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return requests whose asynchronous work is done, and those vLLM must compute itself."""
        results = super().get_transfer_results(finished_req_ids)
        results.failed_recving |= self.worker.take_failed_requests()
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return blocks of the only KV cache group that could not be filled; vLLM computes them."""
        return self.worker.take_failed_blocks()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Send results to the scheduler's side."""
        return self.worker.take_results()

    # Scheduler

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Receive vLLM's blocks, to see which tokens its prefix cache has."""
        groups = [[group] for group in range(len(self._kv_cache_config.kv_cache_groups))]
        self.scheduler.is_cached = lambda block: any(
            gpu_block_pool.get_cached_block(block, group) for group in groups
        )

    def on_new_request(self, request: Request) -> None:
        """Read the job of a new request, or find chunks in its prompt, before vLLM's lookup."""
        self.scheduler.add(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how many tokens of the prompt will be provided: up to its last chunk, or none."""
        return self.scheduler.promise(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Queue the job of a request whose blocks were allocated."""
        self.scheduler.allot(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Hand queued jobs to the worker."""
        return self.scheduler.take_jobs(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Receive results."""
        step = connector_output.kv_connector_worker_meta
        if isinstance(step, StepResults):
            self.scheduler.note_results(step.results)

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Return the result of a request that brought a job."""
        return False, self.scheduler.finish(request)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Return the result of a request that brought a job; its blocks may be freed."""
        return False, self.scheduler.finish(request)

    def reset_cache(self) -> bool:
        """Find no more KV of other weights; what the same weights computed stays."""
        self.scheduler.reset()
        return True

    def shutdown(self) -> None:
        """Write the tokens of chunks that were just stored."""
        if self._scheduler is not None:
            self._scheduler.finding.finder.close()

    # Metrics

    def get_kv_connector_stats(self) -> BlendStats | None:
        """Return the counts since the last call; only the scheduler side counts."""
        return None if self._scheduler is None else self._scheduler.take_stats()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> BlendStats:
        """Return the stats that were sent as ``data``."""
        return BlendStats(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> BlendPromMetrics:
        """Register the counters with vLLM's metrics endpoint."""
        return BlendPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
