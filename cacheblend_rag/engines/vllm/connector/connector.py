"""CacheBlendConnector: CacheBlend in unpatched vLLM, as an out-of-tree KV connector.

To vLLM, blending is loading KV from elsewhere: the scheduler's side says how many tokens of a
request it will provide, the worker's side computes them into the request's blocks. An order for it
comes with the request (``kv_transfer_params``), a report goes back with its last output.

A request is only ever blended under a ``cache_salt`` of its own: otherwise vLLM's prefix cache
would serve its approximate KV to ordinary requests.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import torch
from vllm import __version__ as vllm_version
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.forward_context import set_forward_context
from vllm.v1.kv_cache_interface import SlidingWindowSpec

from cacheblend_rag.engines.identity import model_identity, weights_in_files
from cacheblend_rag.engines.obstacles import explained
from cacheblend_rag.engines.vllm.connector.blender import (
    DEVICE_ERRORS,
    RANK_FAILED,
    Blender,
    Job,
    Result,
)
from cacheblend_rag.engines.vllm.connector.metrics import BlendPromMetrics, BlendStats
from cacheblend_rag.engines.vllm.connector.stack import all_reduce
from cacheblend_rag.engines.vllm.connector.support import refusal_of
from cacheblend_rag.engines.vllm.protocol.job import (
    ASKS,
    NO_REPORT,
    PARAMETER,
    SALT_PREFIX,
    VERSION,
    Order,
    sent_report_id,
)
from cacheblend_rag.engines.vllm.serve import AttentionMode, check_attention_mode
from cacheblend_rag.engines.vllm.versions import check_version
from cacheblend_rag.errors import CacheBlendError, ConfigError
from cacheblend_rag.kv.chunk_kv import chunk_id, fingerprint, namespace_id
from cacheblend_rag.kv.store import TieredKVStore

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

STEP_TOKENS = 8192
LONGEST_REASON = 500
CARRIER_TOKENS = 2
"""Tokens after which a request ends that was sent for its order only; results may take as many."""
CANCELLED: Result = {"error": "cancelled"}
KEPT_REPORTS = 1024
"""Results kept for ``report`` orders, and as many for repeats of a blend."""


@dataclass(frozen=True)
class ConnectorSettings:
    """``kv_connector_extra_config``, checked.

    kv_path: folder for chunk KV, None for memory only. host_bytes, disk_bytes: room. namespace: of
    all KV here. asynchronous: blend between scheduler steps, so that neighbours keep decoding;
    always so where all layers have a sliding window. slice_seconds: work a step, while others are
    decoding; None is what suits the device (see Slices). step_tokens: of synchronous work, tokens
    provided in one step; a request that would exceed them waits for the next. attention: see
    PagedKV. replicas: of this engine behind one address (data parallelism); who starts them says
    so, since they do not know of each other.
    """

    kv_path: str | None = None
    host_bytes: int = 4 << 30
    disk_bytes: int | None = None
    namespace: str = "default"
    asynchronous: bool = True
    slice_seconds: float | None = None
    step_tokens: int = STEP_TOKENS
    attention: AttentionMode = "auto"
    replicas: int = 1

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
        check_attention_mode(settings.attention)
        for name in ("slice_seconds", "step_tokens", "replicas"):
            value = getattr(settings, name)
            if value is None and name == "slice_seconds":
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
                raise ConfigError(f"{name}={value!r} must be a number above 0")
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
    """From worker to scheduler: results by request. All ranks send the same requests' results."""

    results: dict[str, Result]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Keep the first rank's results, unless another one's says what went wrong."""
        assert isinstance(other, _Results)  # noqa: S101 (all ranks run this connector)
        for request_id, result in other.results.items():
            mine = self.results.get(request_id, RANK_FAILED)
            if mine.get("error") == RANK_FAILED["error"] or _stored(result) < _stored(mine):
                self.results[request_id] = result
        return self


@dataclass
class _Pending:
    """What the scheduler's side knows of a request: its order, and why it was not blended.

    tokens: of the prompt that are to be provided. sent: a worker has the job, so a result will
    come. report_id: under which the result is to be kept, or "". blends: its order is to blend.
    work: the blend's, see ``_work_of``.
    """

    order: Order | None
    reason: str | None = None
    report_id: str = ""
    blends: bool = True
    sent: bool = False
    tokens: int = 0
    work: str = ""
    result: Result | None = None


class CacheBlendConnector(KVConnectorBase_V1):
    """See the module."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        check_version(vllm_version)
        super().__init__(vllm_config, role, kv_cache_config)
        self._settings = ConnectorSettings.of(vllm_config)
        self._pending: dict[str, _Pending] = {}
        self._reports: OrderedDict[str, Result] = OrderedDict()
        self._blended: OrderedDict[str, Result] = OrderedDict()
        self._late: dict[str, _Pending] = {}
        self._stats = BlendStats()
        self._promised = 0
        self._asynchronous = self._settings.asynchronous or _drops_blocks(kv_cache_config)
        self._new: list[Job] = []
        self._gone: list[str] = []
        self._blender: Blender | None = None
        self._refusal = refusal_of(vllm_config, kv_cache_config) or ""
        self._done: set[str] = set()
        self._results: dict[str, Result] = {}
        self._at_work: dict[str, Job] = {}
        self._failed_blocks: set[int] = set()

    @property
    def requires_kv_delivery(self) -> bool:
        """Nobody waits for KV from here: a request that is preempted keeps its output."""
        return False

    # Worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Get ready to blend; a model that cannot be blended is served by ordinary prefill."""
        made: list[Blender] = []
        with set_forward_context(None, self._vllm_config):
            if self._all_ranks_can(lambda: made.append(self._make_blender())) and (
                self._all_ranks_can(made[0].try_model)
            ):
                self._blender = made[0]
        if self._blender is None:
            logger.warning("blending is off: %s", self._refusal)

    def _all_ranks_can(self, begin: Callable[[], None]) -> bool:
        """Do something unless blending is refused already; whether every rank could.

        What one rank cannot do, none may go on from: they compute together.
        """
        try:
            if not self._refusal:
                begin()
        except DEVICE_ERRORS:
            raise
        except Exception as error:  # a model of a kind nobody has tried, say
            logger.debug("this model cannot be blended", exc_info=True)
            self._refusal = explained(self._vllm_config.model_config.hf_config, error)
        refused = all_reduce(torch.tensor([bool(self._refusal)], dtype=torch.int32), "max")
        if refused.item():
            self._refusal = self._refusal or "another rank cannot blend"
        return not self._refusal

    def _make_blender(self) -> Blender:
        config = self._vllm_config
        return Blender(
            config,
            self._kv_cache_config,
            TieredKVStore.open(
                host_bytes=self._settings.host_bytes,
                disk_path=self._settings.kv_path,
                disk_bytes=self._settings.disk_bytes,
            ),
            self._identity,
            namespace=self._settings.namespace,
            mode=self._settings.attention,
            slice_seconds=self._settings.slice_seconds,
        )

    def _identity(self, keys: Sequence[int]) -> dict[str, Any]:
        """Return what this rank's KV depends on; keys: how they come out (``key_traits``)."""
        model = self._vllm_config.model_config
        return model_identity(
            weights_in_files(model.model, model.dtype, model.revision),
            model.hf_config,
            model.dtype,
            keys=keys,
            rank=get_tensor_model_parallel_rank(),
            ranks=self._vllm_config.parallel_config.tensor_parallel_size,
        )

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Begin new jobs; finish those that are waited for; work on the others for a slice."""
        meta = self._get_connector_metadata()
        if not isinstance(meta, _Meta):
            return
        self._at_work |= {job.request_id: job for job in meta.jobs}
        if self._blender is None:
            for job in meta.jobs:
                asked = job.order.kind == "status"
                self._finish(job.request_id, self._status() if asked else {"error": self._refusal})
            return
        for request_id in meta.gone:
            if self._blender.cancel(request_id):
                self._finish(request_id, CANCELLED)
        for job in meta.jobs:
            if job.order.kind == "status":
                self._finish(job.request_id, self._status())
                continue
            self._blender.start(job)
            if job.wait:
                for request_id, result in self._blender.advance(None, only=job.request_id):
                    self._finish(request_id, result)
        slices = self._blender.slices
        budget = slices.busy if meta.busy else slices.idle
        for request_id, result in self._blender.advance(budget):
            self._finish(request_id, result)

    def _finish(self, request_id: str, result: Result) -> None:
        """Note a result; blocks that were promised but not filled are vLLM's to compute."""
        job = self._at_work.pop(request_id)
        self._results[request_id] = result
        if not job.wait:
            self._done.add(request_id)
        if _leaves_blocks_empty(result, job.order.kind == "blend"):
            size = self._vllm_config.cache_config.block_size
            self._failed_blocks |= set(job.block_ids[job.first // size : -(-job.until // size)])

    def _status(self) -> Result:
        """Say whether and how this worker blends."""
        blender, settings = self._blender, self._settings
        held = blender.store.stats().values() if blender else ()
        return {
            "active": blender is not None,
            "refusal": self._refusal,
            "identity": fingerprint(blender.identity, settings.namespace) if blender else "",
            "vllm": vllm_version,
            "cacheblend_rag": version("cacheblend-rag"),
            "wire": VERSION,
            "replicas": settings.replicas,
            "shared": settings.kv_path is not None,
            "tensor_parallel": self._vllm_config.parallel_config.tensor_parallel_size,
            "asynchronous": self._asynchronous,
            "attention": settings.attention,
            "namespace": namespace_id(settings.namespace),
            "store": {
                "chunks": max((tier["entries"] or 0 for tier in held), default=0),
                "bytes": max((tier["bytes"] or 0 for tier in held), default=0),
            },
        }

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
            model = self._vllm_config.model_config
            pending = _read_order(request, self._refusal, model)
            self._pending[request.request_id] = pending
        if pending.order is None or pending.order.kind == "report":
            return 0, False
        if not pending.blends:
            request.max_tokens = min(request.max_tokens, CARRIER_TOKENS)
        tokens = pending.order.chunks[-1].end if pending.blends else 1
        external = tokens - num_computed_tokens
        if external <= 0:
            work = _work_of(request, tokens)
            if pending.result is None and work in self._blended:
                pending.result = _repeated(self._blended[work])
            pending.reason = "vLLM's prefix cache holds this prompt already"
            return 0, False
        if self._is_step_full(external):
            return None, False
        pending.tokens, pending.work = tokens, _work_of(request, tokens)
        return external, self._asynchronous

    def _is_step_full(self, tokens: int) -> bool:
        """Whether so many more tokens are too much synchronous work for this step."""
        if self._asynchronous or not self._promised:
            return False
        return self._promised + tokens > self._settings.step_tokens

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Queue the job of a request that has got its blocks."""
        pending = self._pending.get(request.request_id)
        if pending is None or pending.order is None or num_external_tokens == 0:
            return
        pending.sent, pending.result = False, None
        self._promised += num_external_tokens
        self._new.append(
            Job(
                request_id=request.request_id,
                order=pending.order,
                tokens=pending.order.tokens or tuple(request.prompt_token_ids),
                first=pending.tokens - num_external_tokens,
                until=pending.tokens,
                block_ids=tuple(blocks.get_block_ids()[0]),
                wait=not self._asynchronous,
            )
        )

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Hand queued jobs to the worker."""
        meta = _Meta(self._new, self._gone, scheduler_output.total_num_scheduled_tokens > 0)
        for job in self._new:
            self._pending[job.request_id].sent = True
        self._new, self._gone, self._promised = [], [], 0
        return meta

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take results in."""
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, _Results):
            for request_id, result in meta.results.items():
                late = self._late.pop(request_id, None)
                if late is not None:
                    self._conclude(late, result)
                pending = self._pending.get(request_id)
                if pending is None:
                    continue
                pending.result = result
                if _leaves_blocks_empty(result, pending.blends):  # vLLM's now: promise none again
                    pending.order = None

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Return the report of a request that brought an order."""
        pending = self._pending.pop(request.request_id, None)
        self._new = [job for job in self._new if job.request_id != request.request_id]
        if pending is None:
            return False, None
        if pending.order is not None and pending.order.kind == "report":
            found = self._reports.pop(pending.order.report_id, dict(NO_REPORT))
            return False, {PARAMETER: found}
        if pending.sent and pending.result is None:
            self._gone.append(request.request_id)
            self._late[request.request_id] = pending
            return False, {PARAMETER: {"late": True}}
        result = pending.result or ({"reason": pending.reason} if pending.reason else None)
        if result is None:
            return False, None
        self._conclude(pending, result)
        return False, {PARAMETER: result}

    def _conclude(self, pending: _Pending, result: Result) -> None:
        """Count a finished request's result; keep it for a later ``report``, not the oldest."""
        if pending.blends and result != CANCELLED:
            self._stats.record(result)
        if pending.work and not _leaves_blocks_empty(result, pending.blends):
            _keep(self._blended, pending.work, result)
        if pending.report_id:
            _keep(self._reports, pending.report_id, result)

    # Metrics

    def get_kv_connector_stats(self) -> BlendStats | None:
        """Return what was counted since the last call; all of it on the scheduler's side."""
        if self._stats.is_empty():
            return None
        stats, self._stats = self._stats, BlendStats()
        return stats

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


def _keep(results: OrderedDict[str, Result], name: str, result: Result) -> None:
    """Keep a result, and forget the oldest one when there are many."""
    results[name] = result
    if len(results) > KEPT_REPORTS:
        results.popitem(last=False)


def _work_of(request: Request, tokens: int) -> str:
    """Name the blend of a request's first ``tokens`` tokens: vLLM shares its blocks under it."""
    return f"{request.cache_salt} {chunk_id(request.prompt_token_ids[:tokens])}"


def _repeated(result: Result) -> Result:
    """Return the result of a blend whose KV vLLM's prefix cache still had: nothing was done."""
    cached = {"recomputed": 0, "tier": "prefix cache"}
    return {
        **result,
        "compute_share": 0.0,
        "seconds": {},
        "work_seconds": 0.0,
        "wall_seconds": 0.0,
        "chunks": [{**chunk, **cached} if chunk["hit"] else chunk for chunk in result["chunks"]],
    }


def _stored(result: Result) -> float:
    """Chunks a rank has stored: a chunk is stored once all ranks have their part of it."""
    return float(result.get("computed", 0))


def _leaves_blocks_empty(result: Result, blends: bool) -> bool:
    """Whether the blocks a job was to fill are left to vLLM: they hold other requests' KV still."""
    return not blends or "error" in result or "reason" in result


def _drops_blocks(kv_cache_config: KVCacheConfig) -> bool:
    """Whether vLLM gives no blocks to what lies before the sliding window.

    It recomputes a failed synchronous load in the blocks it has, so a load must not be one.
    """
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    return any(isinstance(spec, SlidingWindowSpec) for spec in specs)


def _read_order(request: Request, refusal: str, model: ModelConfig) -> _Pending:
    """Return a request's order, or the reason why it is served by ordinary prefill."""
    named = ""
    try:
        params = request.kv_transfer_params
        named = sent_report_id(params)
        order = Order.from_params(params, request.num_prompt_tokens)
        if order is None:
            return _Pending(None, blends=False)
        order.check(longest=model.max_model_len, vocabulary=model.get_vocab_size())
        reason = _decline(request, "" if order.kind in ASKS else refusal)
    except Exception as error:  # whatever it is, it must end this request's work and no other's
        said = str(error) if isinstance(error, CacheBlendError) else type(error).__name__
        return _Pending(None, f"malformed order: {said[:LONGEST_REASON]}", named)
    return _Pending(None if reason else order, reason, named, order.kind == "blend")


def _decline(request: Request, refusal: str) -> str | None:
    """Say why a request's order is not carried out, or None."""
    if refusal:
        return refusal
    if not (request.cache_salt or "").startswith(SALT_PREFIX):
        return f"cache_salt must begin with {SALT_PREFIX!r}"
    if request.lora_request is not None:
        return "LoRA requests are not blended"
    if request.mm_features or request.prompt_embeds is not None:
        return "prompts that are not text only are not blended"
    return None
