"""The worker side of the connector.

It prepares blending, runs the scheduler side's jobs, one slice between two steps, and
reports results, finished requests and unfilled blocks.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING

import torch
from vllm import __version__ as vllm_version
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.forward_context import set_forward_context

from cacheblend_rag.blend import FusedKV
from cacheblend_rag.engines.model_files import explained, vllm_generation_values
from cacheblend_rag.engines.sampling import ResolvedSampling, warn_of_ignored
from cacheblend_rag.engines.vllm.connector.blender import DEVICE_ERRORS, Blender
from cacheblend_rag.engines.vllm.connector.compatibility import FAILS_REQUESTS
from cacheblend_rag.engines.vllm.connector.finding import identity_of
from cacheblend_rag.engines.vllm.connector.metadata import (
    Allotted,
    StepJobs,
    StepResults,
    leaves_blocks_empty,
)
from cacheblend_rag.engines.vllm.connector.pace import OwnTime, PrefillTimer
from cacheblend_rag.engines.vllm.connector.settings import ConnectorSettings
from cacheblend_rag.engines.vllm.connector.stack import all_reduce
from cacheblend_rag.engines.vllm.connector.trial import warm_up
from cacheblend_rag.engines.vllm.namespaces import are_told_apart
from cacheblend_rag.engines.vllm.protocol.job import Ask
from cacheblend_rag.engines.vllm.protocol.result import (
    CANCELLED,
    ConnectorStatus,
    Failed,
    Result,
    StoredKV,
)
from cacheblend_rag.errors import StoreError
from cacheblend_rag.kv.chunk_kv import fingerprint, namespace_id
from cacheblend_rag.kv.store import TieredKVStore
from cacheblend_rag.prefill.policy import Rates
from cacheblend_rag.reason import Reason, ReasonCode

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger(__name__)

WEIGHTS_CHANGED = Failed(Reason(ReasonCode.MODEL_CHANGED, "other weights were loaded meanwhile"))
OTHER_RANK = Reason(ReasonCode.UNSUPPORTED_MODEL, "another rank cannot blend")


class ConnectorWorker:
    """Runs jobs one slice between two steps, and reports their results.

    refusal: why nothing is blended here, or None.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        settings: ConnectorSettings,
        refusal: Reason | None,
    ) -> None:
        self.blender: Blender | None = None
        self.at_work: dict[str, Allotted] = {}
        self._vllm_config, self._kv_cache_config = vllm_config, kv_cache_config
        self._settings, self._refusal = settings, refusal
        self._done: set[str] = set()
        self._results: dict[str, Result] = {}
        self._failed_blocks: set[int] = set()
        self._failed_requests: set[str] = set()
        self._timer = PrefillTimer((), Rates())  # of no layers, where nothing is blended
        self._own_time = OwnTime()
        generation = vllm_generation_values(vllm_config.model_config)
        self._sampling = ResolvedSampling.of_model(generation)
        warn_of_ignored(generation)

    def get_ready(self) -> None:
        """Create the blender; a model that cannot be blended is served by ordinary prefill."""
        made: list[Blender] = []
        with set_forward_context(None, self._vllm_config):
            if self._all_ranks_can(lambda: made.append(self._make_blender())) and (
                self._all_ranks_can(made[0].try_model)
                and self._all_ranks_can(lambda: warm_up(made[0].jobs))
            ):
                self.blender = made[0]
                self._timer, self._own_time = made[0].timer, made[0].jobs.own_time
        if self.blender is None:
            logger.warning("blending is off: %s", self._refusal)

    def _all_ranks_can(self, begin: Callable[[], None]) -> bool:
        """Run a step of preparing unless blending is refused; returns whether every rank could.

        If one rank fails, none may continue, since ranks compute together.
        """
        try:
            if self._refusal is None:
                begin()
        except DEVICE_ERRORS:
            raise
        except Exception as error:  # a model of a kind nobody has tried, say
            logger.debug("this model cannot be blended", exc_info=True)
            self._refusal = explained(self._vllm_config.model_config.hf_config, error)
        refused = all_reduce(torch.tensor([self._refusal is not None], dtype=torch.int32), "max")
        if refused.item():
            self._refusal = self._refusal or OTHER_RANK
        return self._refusal is None

    def _make_blender(self) -> Blender:
        settings = self._settings
        return Blender(
            self._vllm_config,
            self._kv_cache_config,
            TieredKVStore.of(settings.store, device=self._vllm_config.device_config.device),
            partial(
                identity_of, self._vllm_config, settings, rank=get_tensor_model_parallel_rank()
            ),
            namespace=settings.namespace,
            slice_seconds=settings.slice_seconds,
        )

    def begin_step(self, step: StepJobs) -> None:
        """Begin to time vLLM's own prefill."""
        self._timer.begin(step.computed)

    def end_step(self) -> None:
        """Mark the end of the model's run."""
        self._timer.end()

    def work(self, step: StepJobs) -> None:
        """Run jobs; a step with any does not count as vLLM's own prefill."""
        if step.jobs or (self.blender is not None and not self.blender.is_idle):
            self._timer.leave_out()
        with self._own_time:
            self._work(step)

    def _work(self, step: StepJobs) -> None:
        """Begin new jobs, and run all for a slice."""
        self.at_work |= {new.request_id: new for new in step.jobs}
        blender = self.blender
        if blender is not None:
            self._end_jobs(blender, step)
        for new in step.jobs:
            if isinstance(new.work, Ask) and new.work.kind == "status":
                self._finish(new.request_id, self.status(new.namespace))
            elif blender is None:
                self._finish(new.request_id, Failed(self._refusal or OTHER_RANK))
            else:
                blender.start(new)
        if blender is None:
            return
        # Another request may compute the blocks of a prefix that was just found in this very step.
        resting = {new.request_id for new in step.jobs if step.busy and new.first}
        slices = blender.slices
        if not blender.is_idle:
            self._advance(blender, slices.busy if step.busy else slices.idle, resting=resting)
        elif not step.busy:  # filling must delay new requests as little as possible
            self._advance(blender, slices.busy)

    def _end_jobs(self, blender: Blender, step: StepJobs) -> None:
        """End the jobs of requests that ended, and all if the model has other weights."""
        for request_id in step.gone:
            if blender.cancel(request_id):
                self._finish(request_id, CANCELLED)
        if (step.jobs or step.reset) and blender.has_other_weights():
            for request_id in [*blender.at_work]:
                blender.cancel(request_id)
                self._finish(request_id, WEIGHTS_CHANGED)

    def _advance(self, blender: Blender, seconds: float, resting: Collection[str] = ()) -> None:
        for request_id, result in blender.advance(seconds, resting=resting):
            self._finish(request_id, result)

    def _finish(self, request_id: str, result: Result) -> None:
        """Record a result; vLLM computes blocks that were promised but not filled."""
        done = self.at_work.pop(request_id)
        self._results[request_id] = result
        self._done.add(request_id)
        if leaves_blocks_empty(result, blends=done.is_blend):
            if FAILS_REQUESTS:
                self._failed_requests.add(request_id)
            else:
                size = self._vllm_config.cache_config.block_size
                self._failed_blocks |= set(done.blocks(size))

    def status(self, namespace: str | None = None) -> ConnectorStatus:
        """Return whether and how this worker blends; namespace: the asker's, None is the server's.

        What it says of the store is its namespace's alone where there are several.
        """
        blender, settings = self.blender, self._settings
        namespace = settings.namespace if namespace is None else namespace
        by_key = are_told_apart(tenants=settings.tenants)
        tenant = namespace_id(namespace) if by_key else ""
        return ConnectorStatus(
            active=blender is not None,
            refusal=self._refusal,
            identity=fingerprint(blender.identity, namespace) if blender else "",
            vllm=vllm_version,
            cacheblend_rag=version("cacheblend-rag"),
            replicas=settings.replicas,
            shared=settings.store.outlives,
            tensor_parallel=self._vllm_config.parallel_config.tensor_parallel_size,
            namespace=namespace_id(namespace),
            read_only=settings.store.read_only,
            store=_stored(blender.store, tenant) if blender else StoredKV(),
            sampling=self._sampling,
            profile=json.dumps(settings.profile.to_dict()) if settings.profile else "",
            guard=settings.guard,
            token_bytes=self._token_bytes,
        )

    @property
    def _token_bytes(self) -> int:
        """Bytes of one token's KV, on all ranks together; 0 where nothing is blended."""
        if self.blender is None:
            return 0
        ranks = int(self._vllm_config.parallel_config.tensor_parallel_size)
        return ranks * FusedKV.bytes_for(self.blender.stack.geometry, 1)

    def take_done(self) -> set[str] | None:
        """Return requests whose jobs are done since the last call."""
        done, self._done = self._done, set()
        return done or None

    def take_failed_blocks(self) -> set[int]:
        """Return blocks that could not be filled; vLLM computes them."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_failed_requests(self) -> set[str]:
        """Return requests that vLLM computes itself."""
        failed, self._failed_requests = self._failed_requests, set()
        return failed

    def take_results(self) -> StepResults | None:
        """Return results for the scheduler's side."""
        results, self._results = self._results, {}
        return StepResults(results) if results else None


def _stored(store: TieredKVStore, tenant: str) -> StoredKV:
    """Return the usage of the fullest tier: the others hold copies of some chunks.

    tenant: the hash of the only namespace to count; "" counts all.
    """
    if tenant:
        try:
            held = store.entries().items()
        except StoreError:
            return StoredKV(None, None)
        own = [entry.nbytes for key, entry in held if key.fingerprint.startswith(tenant)]
        return StoredKV(len(own), sum(own))
    told = store.stats().values()
    counts, sizes = ([tier[name] for tier in told] for name in ("entries", "bytes"))
    return StoredKV(
        None if None in counts else max(filter(None, counts), default=0),
        None if None in sizes else max(filter(None, sizes), default=0),
    )
