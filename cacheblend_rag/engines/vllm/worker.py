"""Blender: does the connector's orders inside a vLLM worker, a block of rows at a time."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs
from vllm.v1.worker.utils import select_common_block_size

from cacheblend_rag.blend import FusedKV
from cacheblend_rag.blend.rows import Rows
from cacheblend_rag.blend.stack import on_all_ranks
from cacheblend_rag.blend.trial import (
    TRIAL_TOKENS,
    Reference,
    check_embedding,
    check_layers,
    find_layouts,
    key_traits,
    made_up,
    tokens_behind,
    trial_tokens,
)
from cacheblend_rag.engines.vllm.pace import Pace, Slices
from cacheblend_rag.engines.vllm.paged import PagedCache, PagedKV
from cacheblend_rag.engines.vllm.serving import AttentionMode
from cacheblend_rag.engines.vllm.stack import VLLMStack, across_ranks
from cacheblend_rag.engines.vllm.wire import Order, SentChunk
from cacheblend_rag.errors import CacheBlendError, UnsupportedModelError
from cacheblend_rag.kv.chunk_kv import KVKey, chunk_id, fingerprint
from cacheblend_rag.kv.fetch import Fetch
from cacheblend_rag.kv.store import TieredKVStore
from cacheblend_rag.prefill.blended import PromptPass, absence
from cacheblend_rag.prefill.lead_in import ChunkPlan, PlacedChunk
from cacheblend_rag.prefill.policy import too_little
from cacheblend_rag.prefill.precompute import (
    Computed,
    DocumentPlan,
    compute_chunks,
    compute_document,
    compute_one_by_one,
)

logger = logging.getLogger(__name__)

Result = dict[str, Any]
Work = Generator[None, None, Result]

ROW_BLOCK = 768
"""Most rows at once on a CPU; an accelerator takes as many as vLLM has profiled."""
MODES: tuple[AttentionMode, ...] = ("native", "sdpa")
DEVICE_ERRORS = (torch.AcceleratorError,)
"""After these nothing that is asked of the device succeeds."""
RANK_FAILED: Result = {"error": "blending failed on another rank"}


@dataclass(frozen=True)
class Job:
    """One request's order with what the scheduler allotted to it.

    tokens: the whole prompt. first, until: its tokens [first, until) are to be provided; those
    before stand in the cache already. block_ids: the request's blocks. wait: it is needed in this
    step.
    """

    request_id: str
    order: Order
    tokens: tuple[int, ...]
    first: int
    until: int
    block_ids: tuple[int, ...]
    wait: bool = False


class Blender:
    """Works on orders over one model, its paged cache and a store of chunk KV.

    identify: says what makes this worker's KV interchangeable with others', without the lead-in,
    once it is known how its keys come out (``key_traits``). slice_seconds: see Slices.
    Raises UnsupportedModelError when the model cannot be driven.
    """

    def __init__(
        self,
        vllm_config: Any,
        kv_cache_config: Any,
        store: TieredKVStore,
        identify: Callable[[Sequence[int]], dict[str, Any]],
        *,
        namespace: str,
        mode: AttentionMode,
        slice_seconds: float | None = None,
    ) -> None:
        context = vllm_config.compilation_config.static_forward_context
        attention = {name: layer for name, layer in context.items() if hasattr(layer, "impl")}
        most = int(vllm_config.scheduler_config.max_num_batched_tokens)
        on_cpu = vllm_config.device_config.device_type == "cpu"
        self.stack = VLLMStack(attention, vllm_config, min(ROW_BLOCK, most) if on_cpu else most)
        self.store, self.namespace, self.mode = store, namespace, mode
        self.identity: dict[str, Any] = {}
        self._identify = identify
        self._cache = _paged_cache(vllm_config, kv_cache_config, self.stack)
        self._blocks = int(kv_cache_config.num_blocks)
        self._window = int(vllm_config.model_config.max_model_len)
        self._vocabulary = int(vllm_config.model_config.get_vocab_size())
        self._pace = Pace.of(self.stack.geometry.device)
        self.slices = Slices.of(self.stack.geometry.device, slice_seconds)
        self._at_work: dict[str, Work] = {}
        self._fetches: dict[str, Fetch] = {}
        self._worked: dict[str, float] = {}
        self._together: set[str] = set()

    @torch.inference_mode()
    def try_model(self) -> None:
        """Try the model, which also sets up what is set up lazily, before the first order.

        To be called while no request holds blocks: it writes into some. Raises
        UnsupportedModelError when its layers, driven alone, do not do what they do in the model.
        """
        ids = trial_tokens(self._vocabulary, self.stack.geometry.device)
        fused = self._made_up(ids)
        blocks = range(1, 1 - (-fused.tokens // self._cache.block_size))
        start = fused.tokens - ids.numel()
        own = PagedKV(self._cache, blocks, 0, fused.tokens, "native")
        for layer in range(self.stack.geometry.layers):
            own.finish_layer(layer, fused)
        rows = Rows.at(np.arange(start, fused.tokens), self.stack.geometry.device)
        with self.stack.recorded() as (inputs, outputs):
            self.stack.run_model(ids, rows.device, *own.run(rows))
        reference = Reference(ids, start, inputs, outputs)
        check_embedding(self.stack, reference)
        self.stack.layouts = find_layouts(self.stack, ids, self._window)
        for mode in MODES if self.mode == "auto" else (self.mode,):
            paged = PagedKV(self._cache, blocks, 0, fused.tokens, mode)
            check_layers(self.stack, reference, fused, paged.attend, rounded=self._is_rounded)
        self.identity = self._identify(key_traits(self.stack, ids))

    @property
    def _is_rounded(self) -> bool:
        """Whether KV is stored in fewer bits than it is computed in."""
        return bool(self._cache.attention[0].kv_cache.itemsize < self.stack.geometry.dtype.itemsize)

    def _made_up(self, ids: Tensor) -> FusedKV:
        """Return made-up KV, as much as the cache has blocks for beside the trial's tokens."""
        room = min(self._window, (self._blocks - 1) * self._cache.block_size)
        behind = tokens_behind(self.stack.windows, room)
        first = self.stack.at(torch.zeros(1, TRIAL_TOKENS, dtype=torch.long, device=ids.device))
        return made_up(
            self.stack, behind, self.stack.probe_layer(0, self.stack.embed(ids[None]), first)
        )

    def start(self, job: Job) -> None:
        """Take a job on, and begin to read the chunks it is to blend; ``advance`` works on it."""
        self._leave(job.request_id)
        keys = self._chunk_keys(job)
        fetch = self.store.fetch(keys if job.order.kind == "blend" else ())
        self._fetches[job.request_id] = fetch
        self._at_work[job.request_id] = self._work(job, keys, fetch)
        self._worked[job.request_id] = 0.0

    def cancel(self, request_id: str) -> bool:
        """Give a job up; returns whether it was at work."""
        self._worked.pop(request_id, None)
        self._leave(request_id)
        return self._at_work.pop(request_id, None) is not None

    def _leave(self, request_id: str) -> None:
        """Let go of what belongs to a job that is over: chunks that it did not take."""
        self._together.discard(request_id)
        if fetch := self._fetches.pop(request_id, None):
            fetch.close()

    def advance(
        self, seconds: float | None, only: str | None = None
    ) -> Iterator[tuple[str, Result]]:
        """Work for so long, oldest job first; yields jobs that are done, with their results."""
        until = math.inf if seconds is None else time.perf_counter() + seconds
        for request_id, work in list(self._at_work.items()):
            if only is not None and request_id != only:
                continue
            started = time.perf_counter()
            result = self._step(request_id, work, until)
            self._worked[request_id] += time.perf_counter() - started
            if result is None:
                return
            del self._at_work[request_id]
            self._leave(request_id)
            yield request_id, {**result, "work_seconds": self._worked.pop(request_id)}

    @torch.inference_mode()
    def _step(self, request_id: str, work: Work, until: float) -> Result | None:
        """Run a job until it is done or time is up; None when it is not done.

        Ranks stop after the same step, since each step has all of them take part: the first one's
        clock decides, and a failure of one is a failure of all.
        """
        while True:
            result = self._next_result(request_id, work)
            here = [result is not None and "error" in result, self._pace.is_over(until)]
            failed, late = self._agreed(here)
            if result is not None or failed:
                is_told = result is not None and ("error" in result or not failed)
                return result if is_told else dict(RANK_FAILED)
            if late:
                return None

    def _next_result(self, request_id: str, work: Work) -> Result | None:
        """Do a job's next step; its result when that was the last one, or when it failed.

        Once a job runs layers, ranks meet in the middle of its steps: what fails then on one rank
        must end the engine, since the others wait there for a rank that will not come. A device in
        error ends it always. vLLM hears the exceptions of one rank only, but sees any rank's
        process go.
        """
        self.stack.met = False
        try:
            next(work)
        except StopIteration as done:
            return dict(done.value)
        except Exception as error:
            has_met = self.stack.met or request_id in self._together
            if isinstance(error, DEVICE_ERRORS) or (has_met and get_tp_group().world_size > 1):
                logger.critical("blending failed where vLLM cannot go on from", exc_info=True)
                if get_tp_group().world_size > 1:
                    raise SystemExit(1) from error
                raise
            if isinstance(error, CacheBlendError):
                return {"error": str(error)}
            logger.exception("a request could not be blended")  # it must not end the server
            return {"error": f"blending failed: {type(error).__name__}"}
        if self.stack.met:
            self._together.add(request_id)
        return None

    def _agreed(self, here: list[bool]) -> list[bool]:
        """Return whether any rank failed, and whether the first one's time is up."""
        ranks = get_tp_group()
        if ranks.world_size == 1:
            return here
        failed, late = here
        seen = torch.tensor([failed, late and ranks.is_first_rank], dtype=torch.int32)
        return [bool(flag) for flag in across_ranks(seen, "max").tolist()]

    def _work(self, job: Job, keys: Sequence[KVKey], fetch: Fetch) -> Work:
        """Do an order. keys: of the chunks that it has tokens of. fetch: those to be blended."""
        if job.order.kind in {"evict", "prefetch"}:
            model = self._fingerprint(job.order)
            named = [KVKey(chunk, model, context) for chunk, context in job.order.keys]
            do = _evict if job.order.kind == "evict" else _prefetch
            return (yield from do(self.store, named))
        if job.order.kind == "precompute":
            return (yield from self._precompute(job, keys))
        return (yield from self._blend(job, keys, fetch))

    def _chunk_keys(self, job: Job) -> list[KVKey]:
        model = self._fingerprint(job.order)
        return [
            KVKey(chunk_id(job.tokens[c.start : c.end]), model, c.context_id)
            for c in job.order.chunks
        ]

    def _blend(self, job: Job, keys: Sequence[KVKey], fetch: Fetch) -> Work:
        started = time.perf_counter()
        placed = [
            PlacedChunk(key, chunk.start, chunk.end, chunk.protected)
            for key, chunk in zip(keys, job.order.chunks, strict=True)
        ]
        if refusal := self._too_little(placed, job.order.config.min_tokens):
            return refusal
        if lack := self._lack_of_room(len(job.tokens)):
            missed = [chunk.report("no room") for chunk in placed]
            return {"reason": lack, "chunks": [asdict(chunk) for chunk in missed]}
        paged = PagedKV(self._cache, job.block_ids, job.first, job.until, self.mode)
        ids = torch.tensor(job.tokens, device=self.stack.geometry.device)
        work = PromptPass(
            self.stack,
            ids,
            placed,
            fetch,
            job.order.config,
            needs_hidden=False,
            until=job.until,
            attention=paged.attend,
            on_layer=paged.finish_layer,
        )
        done = yield from work.steps()
        return {
            "selector": done.selector,
            "ratio": done.ratio,
            "compute_share": done.compute_share,
            "seconds": done.seconds,
            "wall_seconds": time.perf_counter() - started,
            "chunks": [asdict(chunk) for chunk in done.chunks],
        }

    def _lack_of_room(self, tokens: int) -> str | None:
        """Say why a pass over so many tokens does not fit beside vLLM, on some rank, or None.

        vLLM has profiled its own needs only. Its own failure to get memory would end the server.
        """
        needed = self.stack.pass_bytes(tokens)
        free = free_bytes(self.stack.geometry.device)
        if all(on_all_ranks(self.stack, [free is None or needed <= free])):
            return None
        there = "less" if free is None or needed <= free else f"{free >> 20:,} MiB"
        return (
            f"blending {tokens:,} tokens needs {needed >> 20:,} MiB of device memory beside "
            f"vLLM's, there is {there}: serve with a smaller --gpu-memory-utilization"
        )

    def _too_little(self, placed: Sequence[PlacedChunk], least: int) -> Result | None:
        """Say why so few stored chunk tokens are not worth blending; None when they are."""
        held = on_all_ranks(self.stack, self.store.contains_many(c.key for c in placed))
        stored = sum(c.end - c.start for c, there in zip(placed, held, strict=True) if there)
        refused = too_little(stored, least)
        if refused is None:
            return None
        reason, miss = refused
        missed = [c.report(miss or absence(self.store, c.key)) for c in placed]
        return {"reason": reason, "chunks": [asdict(chunk) for chunk in missed]}

    def _precompute(self, job: Job, keys: Sequence[KVKey]) -> Work:
        if lack := self._lack_of_room(len(job.tokens)):
            return {"error": lack}
        led = [_led(job, chunk, key) for key, chunk in zip(keys, job.order.chunks, strict=True)]
        stored = computed = tokens = 0
        if job.order.lead_in.name == "document":
            starts = [chunk.start for chunk in job.order.chunks]
            document = DocumentPlan(list(job.tokens), list(zip(led, starts, strict=True)))
            work = compute_document(self.stack, document, self.store)
        else:
            work = compute_chunks(
                self.stack,
                led,
                self.store,
                alone=self._compute_alone,
                in_document=False,
            )
        refused: dict[str, int] = {}
        for done in work:
            if done is None:
                yield
                continue
            computed += 1
            tokens += done[1].tokens
            if self.store.put(done[0].key, done[1]):
                stored += 1
            else:
                refused["store full"] = refused.get("store full", 0) + 1
            yield
        return {
            "computed": stored,
            "skipped": len(keys) - computed,
            "computed_tokens": tokens,
            "refused": refused,
        }

    def _compute_alone(self, chunks: list[ChunkPlan]) -> Computed:
        return compute_one_by_one(self.stack, chunks, self.store)

    def _fingerprint(self, order: Order) -> str:
        lead = order.lead_in
        parts = {"lead_in": lead.name, "lead_tokens": lead.tokens, "window": lead.window}
        return fingerprint({**self.identity, **parts}, self.namespace)


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes to be had of a device, PyTorch's caches included; None on a CPU."""
    if device.type != "cuda":
        return None
    reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + reserved


def _led(job: Job, chunk: SentChunk, key: KVKey) -> ChunkPlan:
    return ChunkPlan(
        token_ids=job.tokens[chunk.start : chunk.end],
        lead=job.tokens[: chunk.context_start],
        context=job.tokens[chunk.context_start : chunk.start],
        key=key,
    )


def _evict(store: TieredKVStore, keys: Sequence[KVKey]) -> Work:
    evicted = 0
    for key in keys:  # each may wait for a disk
        evicted += store.evict(key)
        yield
    return {"evicted": evicted}


def _prefetch(store: TieredKVStore, keys: Sequence[KVKey]) -> Work:
    for key in keys:
        store.prefetch([key])
        yield
    return {}


def _paged_cache(vllm_config: Any, kv_cache_config: Any, stack: VLLMStack) -> PagedCache:
    """Return the worker's paged cache, with a builder of metadata such as vLLM's own is."""
    backends = {layer.attn_backend for layer in stack.attention}
    if len(backends) != 1:
        raise UnsupportedModelError("layers of this model use several attention backends")
    backend = backends.pop()
    spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        spec = spec.kv_cache_specs[stack.names[0]]
    size = select_common_block_size(spec.block_size, [backend], [spec])
    device = stack.geometry.device
    builder = backend.get_builder_cls()(
        spec.copy_with_new_block_size(size), stack.names, vllm_config, device
    )
    return PagedCache(
        stack.attention,
        builder,
        block_size=spec.block_size,
        kernel_block_size=size,
        most_runs=(
            None if device.type == "cpu" else int(vllm_config.scheduler_config.max_num_seqs)
        ),
    )
