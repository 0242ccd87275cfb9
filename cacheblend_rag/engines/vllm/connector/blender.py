"""Runs jobs inside a vLLM worker, one slice at a time, in step with the other ranks."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from vllm.distributed.parallel_state import get_tp_group

from cacheblend_rag.blend.stack import on_all_ranks
from cacheblend_rag.engines.vllm.connector.job_runner import JobRunner, Work, free_bytes
from cacheblend_rag.engines.vllm.connector.live_weights import LiveWeights
from cacheblend_rag.engines.vllm.connector.metadata import Allotted
from cacheblend_rag.engines.vllm.connector.pace import Pace, PrefillTimer, Slices, events_of
from cacheblend_rag.engines.vllm.connector.paged_cache import paged_cache
from cacheblend_rag.engines.vllm.connector.stack import VLLMStack, all_reduce
from cacheblend_rag.engines.vllm.connector.trial import Trial
from cacheblend_rag.engines.vllm.protocol.result import (
    RANK_FAILED,
    BlendResult,
    Failed,
    Result,
)
from cacheblend_rag.errors import CacheBlendError
from cacheblend_rag.kv.fetch import LayerSource
from cacheblend_rag.kv.store import TieredKVStore
from cacheblend_rag.memory import give_back_unused, lack_of_memory
from cacheblend_rag.reason import Miss, Reason, ReasonCode

logger = logging.getLogger(__name__)

ROW_BLOCK = 768
"""Most rows that a layer computes at once on a CPU. On a GPU they are vLLM's
max_num_batched_tokens; `limit_rows` may halve that, but never below this number."""
DEVICE_ERRORS = (torch.AcceleratorError,)
"""Errors after which no operation on the device succeeds."""


@dataclass
class Running:
    """A job that is worked on.

    source: reads the chunks to blend. seconds: worked on it so far. has_met: whether it has run
    layers, in which ranks wait for each other.
    """

    allotted: Allotted
    source: LayerSource
    work: Work
    seconds: float = 0.0
    has_met: bool = False


@dataclass(frozen=True)
class _OutOfMemory:
    """A step of a job ran out of memory; lack: one line about it."""

    lack: str


class Blender:
    """Runs jobs over one model, its paged cache and a store of chunk KV.

    identify: returns everything that this worker's KV depends on, the lead-in aside, given the
    result of ``key_traits``. slice_seconds: see Slices.
    Raises UnsupportedModelError when the model cannot be run layer by layer.
    """

    def __init__(
        self,
        vllm_config: Any,
        kv_cache_config: Any,
        store: TieredKVStore,
        identify: Callable[[Sequence[int]], dict[str, Any]],
        *,
        namespace: str,
        slice_seconds: float | None = None,
    ) -> None:
        context = vllm_config.compilation_config.static_forward_context
        attention = {name: layer for name, layer in context.items() if hasattr(layer, "impl")}
        most = int(vllm_config.scheduler_config.max_num_batched_tokens)
        on_cpu = vllm_config.device_config.device_type == "cpu"
        self.stack = VLLMStack(attention, vllm_config, min(ROW_BLOCK, most) if on_cpu else most)
        limit_rows(self.stack)
        self.cache = paged_cache(vllm_config, kv_cache_config, self.stack)
        self.jobs = JobRunner(self.stack, self.cache, store, namespace=namespace)
        make_event = events_of(self.stack.geometry.device)
        self.timer = PrefillTimer(self.stack.costs, self.jobs.rates, make_event)
        self.trial = Trial(
            self.stack,
            self.cache,
            blocks=int(kv_cache_config.num_blocks),
            window=int(vllm_config.model_config.max_model_len),
            vocabulary=int(vllm_config.model_config.get_vocab_size()),
        )
        self._identify = identify
        self._pace = Pace(make_event)
        self.slices = Slices.of(self.stack.geometry.device, slice_seconds)
        self.at_work: dict[str, Running] = {}

    @property
    def store(self) -> TieredKVStore:
        """Where chunk KV is kept."""
        return self.jobs.store

    @property
    def identity(self) -> dict[str, Any]:
        """Everything that this worker's KV depends on, the lead-in aside; empty before the test."""
        return self.jobs.identity

    def try_model(self) -> None:
        """Test the model, see Trial, and find out how its cache is read back."""
        self.jobs.identity = self._identify(self.trial.run())
        self._weights = LiveWeights(self.stack.model)
        with torch.inference_mode():
            if self.cache.layouts is None:
                logger.info("vLLM's KV cache cannot be read back: blends compute whole prompts")

    def has_other_weights(self) -> bool:
        """Whether any rank has other weights than when asked last; their KV has keys of its own."""
        if not self._any_rank(self._weights.differ()):
            return False
        loaded = self._weights.loaded()
        if not self._any_rank(loaded != self.identity.get("loaded", "")):
            return False
        at_start = {name: value for name, value in self.identity.items() if name != "loaded"}
        self.jobs.identity = {**at_start, "loaded": loaded} if loaded else at_start
        logger.info("the model has other weights now: their KV is stored separately")
        return True

    def _any_rank(self, found: bool) -> bool:
        return bool(all_reduce(torch.tensor([found], dtype=torch.int32), "max").item())

    def start(self, allotted: Allotted) -> None:
        """Accept a job, and begin to read the chunks to blend; ``advance`` runs it."""
        self.cancel(allotted.request_id)
        source = self.jobs.source(allotted)
        work = self.jobs.work(allotted, source)
        self.at_work[allotted.request_id] = Running(allotted, source, work)

    def cancel(self, request_id: str) -> bool:
        """Cancel a job; returns whether it was running."""
        running = self.at_work.pop(request_id, None)
        if running is not None:
            running.source.close()
        return running is not None

    @property
    def is_idle(self) -> bool:
        """Whether all remaining jobs are for idle time."""
        return all(running.allotted.waits for running in self.at_work.values())

    def advance(
        self, seconds: float, resting: Collection[str] = ()
    ) -> Iterator[tuple[str, Result]]:
        """Work for so many seconds, oldest job first; yields finished jobs with their results.

        Jobs for idle time run when no other job is left, which all ranks see alike. resting: jobs
        that must not go on yet.
        """
        until = time.perf_counter() + seconds
        idle = self.is_idle
        for request_id, running in list(self.at_work.items()):
            if request_id in resting or running.allotted.waits != idle:
                continue
            started = time.perf_counter()
            result = self._step(running, until)
            running.seconds += time.perf_counter() - started
            if result is None:
                return
            self.cancel(request_id)
            if isinstance(result, BlendResult | Failed):
                result = replace(result, work_seconds=running.seconds)
            yield request_id, result

    @torch.inference_mode()
    def _step(self, running: Running, until: float) -> Result | None:
        """Run a job until it is done or time is up; None if it is not done.

        Ranks stop after the same step, since all of them take part in each step: the first one's
        clock decides, and a failure of one is a failure of all.
        """
        while True:
            result = self._next_result(running)
            has_failed = isinstance(result, Failed | _OutOfMemory)
            if isinstance(result, _OutOfMemory):
                result = self._given_up(running.allotted, result.lack)
            failed, late = self._agreed(has_failed, self._pace.is_over(until))
            if result is not None or failed:
                return RANK_FAILED if failed and not has_failed else result
            if late:
                return None

    def _given_up(self, allotted: Allotted, lack: str) -> Result:
        """Free the resources of a job that ran out of memory, after its error, and log it."""
        give_back_unused()
        kind = "blend" if allotted.is_blend else getattr(allotted.work, "kind", "")
        logger.warning("a %s job is abandoned: %s (%s)", kind, Miss.NO_ROOM, lack)
        return self.jobs.no_room(allotted, lack)

    def _next_result(self, running: Running) -> Result | _OutOfMemory | None:
        """Run a job's next step; returns its result after the last one, or if it failed.

        Once a job runs layers, ranks synchronize within its steps: a failure of one rank must then
        end the engine, since the others would wait forever. A device error always ends it. vLLM
        notices exceptions of one rank only, but the exit of any rank's process.
        """
        self.stack.met = False
        try:
            next(running.work)
        except StopIteration as done:
            ended: Result = done.value
            return ended
        except Exception as error:
            has_met = self.stack.met or running.has_met
            lack = lack_of_memory(error)
            is_dead = isinstance(error, DEVICE_ERRORS) and lack is None
            if is_dead or (has_met and get_tp_group().world_size > 1):
                logger.critical("blending failed and vLLM cannot continue", exc_info=True)
                if get_tp_group().world_size > 1:
                    raise SystemExit(1) from error
                raise
            if lack is not None:
                return _OutOfMemory(lack)
            if isinstance(error, CacheBlendError):
                return Failed(Reason(ReasonCode.FAILED, str(error)))
            logger.exception("a request could not be blended")  # it must not end the server
            return Failed(Reason(ReasonCode.FAILED, f"blending failed: {type(error).__name__}"))
        running.has_met |= self.stack.met
        return None

    def _agreed(self, failed: bool, late: bool) -> tuple[bool, bool]:
        """Return whether any rank failed, and whether the first one's time is up."""
        ranks = get_tp_group()
        if ranks.world_size == 1:
            return failed, late
        seen = torch.tensor([failed, late and ranks.is_first_rank], dtype=torch.int32)
        failed, late = all_reduce(seen, "max").tolist()
        return bool(failed), bool(late)


def limit_rows(stack: VLLMStack) -> None:
    """Halve ``stack.row_block`` until a blend pass fits in half of the device's free memory.

    The other half is left for the CUDA graphs, which vLLM captures later. Not below ROW_BLOCK.
    """
    free = free_bytes(stack.geometry.device)
    tokens = stack.row_block
    while stack.row_block >= 2 * ROW_BLOCK and not all(
        on_all_ranks(stack, [free is None or 2 * stack.pass_bytes(tokens, checks=True) <= free])
    ):
        stack.row_block //= 2
