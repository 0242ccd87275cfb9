"""CacheBlendConnector: CacheBlend in unpatched vLLM, as an out-of-tree KV connector.

To vLLM, blending is loading KV from elsewhere: the scheduler's side says how many tokens of a
request it will provide, the worker's side computes them into the request's blocks. An order for it
comes with the request (``kv_transfer_params``), a report goes back with its last output.

A request is only ever blended under a ``cache_salt`` of its own: otherwise vLLM's prefix cache
would serve its approximate KV to ordinary requests.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, get_args

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

from cacheblend_rag.engines.identity import model_identity, weights_in_files
from cacheblend_rag.engines.vllm.paged import AttentionMode
from cacheblend_rag.engines.vllm.wire import PARAMETER, SALT_PREFIX, Order
from cacheblend_rag.engines.vllm.worker import Blender, Job, Result
from cacheblend_rag.errors import CacheBlendError, ConfigError
from cacheblend_rag.kv.store import TieredKVStore

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

SLICE_SECONDS = 0.03


@dataclass(frozen=True)
class ConnectorSettings:
    """``kv_connector_extra_config``, checked.

    kv_path: folder for chunk KV, None for memory only. host_bytes, disk_bytes: room. namespace: of
    all KV here. asynchronous: blend between scheduler steps, so that neighbours keep decoding.
    slice_seconds: work a step, while others are decoding. attention: see PagedKV.
    """

    kv_path: str | None = None
    host_bytes: int = 4 << 30
    disk_bytes: int | None = None
    namespace: str = "default"
    asynchronous: bool = True
    slice_seconds: float = SLICE_SECONDS
    attention: AttentionMode = "auto"

    @classmethod
    def of(cls, vllm_config: VllmConfig) -> ConnectorSettings:
        """Read them from a vLLM config; raises ConfigError on unknown names and values."""
        transfer = vllm_config.kv_transfer_config
        given = dict((transfer.kv_connector_extra_config if transfer else None) or {})
        known = cls.__dataclass_fields__
        for name in given:
            if name not in known:
                raise ConfigError(f"{name} is no setting of the connector; known: {sorted(known)}")
        settings = cls(**given)
        if settings.attention not in get_args(AttentionMode):
            modes = ", ".join(get_args(AttentionMode))
            raise ConfigError(f"attention={settings.attention!r} must be one of {modes}")
        return settings


@dataclass
class _Meta(KVConnectorMetadata):
    """From scheduler to worker: jobs to begin, and requests that are gone.

    busy: others compute in this step, so asynchronous work must leave them time.
    """

    jobs: list[Job] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)
    busy: bool = False


@dataclass
class _Results(KVConnectorWorkerMetadata):
    """From worker to scheduler: results by request."""

    results: dict[str, Result]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Keep the first rank's results: all ranks do the same work."""
        return self


@dataclass
class _Pending:
    """What the scheduler's side knows of a request: its order, and why it was not blended."""

    order: Order | None
    reason: str | None = None
    tokens: int = 0
    external: int = 0
    result: Result | None = None


class CacheBlendConnector(KVConnectorBase_V1):
    """See the module."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._settings = ConnectorSettings.of(vllm_config)
        self._pending: dict[str, _Pending] = {}
        self._new: list[Job] = []
        self._gone: list[str] = []
        self._blender: Blender | None = None
        self._refusal = ""
        self._done: set[str] = set()
        self._results: dict[str, Result] = {}
        self._at_work: dict[str, Job] = {}
        self._failed_blocks: set[int] = set()

    # Worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Get ready to blend; a model that cannot be blended is served by ordinary prefill."""
        config = self._vllm_config
        try:
            self._blender = Blender(
                config,
                TieredKVStore.open(
                    host_bytes=self._settings.host_bytes,
                    disk_path=self._settings.kv_path,
                    disk_bytes=self._settings.disk_bytes,
                ),
                model_identity(
                    weights_in_files(
                        config.model_config.model,
                        config.model_config.dtype,
                        config.model_config.revision,
                    ),
                    config.model_config.hf_config,
                    config.model_config.dtype,
                    rank=get_tensor_model_parallel_rank(),
                    ranks=config.parallel_config.tensor_parallel_size,
                ),
                self._settings.namespace,
                self._settings.attention,
            )
        except CacheBlendError as error:
            self._refusal = str(error)
            logger.warning("blending is off for this model: %s", error)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Begin new jobs; finish those that are waited for; work on the others for a slice."""
        meta = self._get_connector_metadata()
        if not isinstance(meta, _Meta):
            return
        self._at_work |= {job.request_id: job for job in meta.jobs}
        if self._blender is None:
            for job in meta.jobs:
                self._finish(job.request_id, {"error": self._refusal})
            return
        for request_id in meta.gone:
            if self._blender.cancel(request_id):
                self._finish(request_id, {"error": "cancelled"})
        for job in meta.jobs:
            self._blender.start(job)
            if job.wait:
                for request_id, result in self._blender.advance(None, only=job.request_id):
                    self._finish(request_id, result)
        budget = self._settings.slice_seconds if meta.busy else None
        for request_id, result in self._blender.advance(budget):
            self._finish(request_id, result)

    def _finish(self, request_id: str, result: Result) -> None:
        """Note a result; blocks that were promised but not filled are vLLM's to compute."""
        job = self._at_work.pop(request_id)
        self._results[request_id] = result
        if not job.wait:
            self._done.add(request_id)
        if "error" in result:
            size = self._vllm_config.cache_config.block_size
            self._failed_blocks |= set(job.block_ids[job.first // size : -(-job.until // size)])

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return blocks that could not be filled; vLLM recomputes them."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing to wait for: KV is there before the first layer runs."""

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to save: chunk KV is computed by jobs of its own."""

    def wait_for_save(self) -> None:
        """Nothing to wait for."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return requests whose asynchronous work is done."""
        done, self._done = self._done, set()
        return None, done or None

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Send results to the scheduler's side."""
        results, self._results = self._results, {}
        return _Results(results) if results else None

    # Scheduler

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Say how many tokens of the prompt will be provided: up to its last chunk, or none."""
        pending = self._pending.get(request.request_id)
        if pending is None:
            pending = self._pending[request.request_id] = _read_order(request)
        if pending.order is None:
            return 0, False
        tokens = pending.order.chunks[-1].end if pending.order.chunks else 1
        external = tokens - num_computed_tokens
        if external <= 0:
            pending.reason = "vLLM's prefix cache holds this prompt already"
            return 0, False
        pending.tokens, pending.external = tokens, external
        return external, self._settings.asynchronous

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Queue the job of a request that has got its blocks."""
        pending = self._pending.get(request.request_id)
        if pending is None or pending.order is None or num_external_tokens == 0:
            return
        self._new.append(
            Job(
                request_id=request.request_id,
                order=pending.order,
                tokens=tuple(request.prompt_token_ids),
                first=pending.tokens - num_external_tokens,
                until=pending.tokens,
                block_ids=tuple(blocks.get_block_ids()[0]),
                wait=not self._settings.asynchronous,
            )
        )

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Hand queued jobs to the worker."""
        meta = _Meta(self._new, self._gone, scheduler_output.total_num_scheduled_tokens > 0)
        self._new, self._gone = [], []
        return meta

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take results in."""
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, _Results):
            for request_id, result in meta.results.items():
                pending = self._pending.get(request_id)
                if pending is None:
                    continue
                pending.result = result
                if "error" in result:  # vLLM computes these blocks itself: promise none again
                    pending.order = None

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Return the report of a request that brought an order."""
        pending = self._pending.pop(request.request_id, None)
        self._new = [job for job in self._new if job.request_id != request.request_id]
        if pending is None:
            return False, None
        if pending.order is not None and pending.result is None:
            self._gone.append(request.request_id)
        if pending.result is not None:
            return False, {PARAMETER: pending.result}
        return False, {PARAMETER: {"reason": pending.reason}} if pending.reason else None


def _read_order(request: Request) -> _Pending:
    """Return a request's order, or the reason why it is served by ordinary prefill."""
    params = request.kv_transfer_params
    try:
        order = Order.from_params(params, request.num_prompt_tokens)
    except (CacheBlendError, TypeError) as error:
        return _Pending(None, f"malformed order: {error}")
    if order is None:
        return _Pending(None)
    if not (request.cache_salt or "").startswith(SALT_PREFIX):
        return _Pending(None, f"cache_salt must begin with {SALT_PREFIX!r}")
    if request.lora_request is not None:
        return _Pending(None, "LoRA requests are not blended")
    return _Pending(order)
