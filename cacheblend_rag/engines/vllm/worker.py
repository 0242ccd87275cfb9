"""Blender: does the connector's orders inside a vLLM worker, a block of rows at a time."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from vllm.distributed.parallel_state import get_tp_group

from cacheblend_rag.blend import BlendPass, FusedKV
from cacheblend_rag.blend.passes import ROW_BLOCK, Candidates
from cacheblend_rag.blend.probe import REUSE_ONLY
from cacheblend_rag.blend.stack import on_all_ranks
from cacheblend_rag.engines.vllm.paged import PagedKV
from cacheblend_rag.engines.vllm.serving import AttentionMode
from cacheblend_rag.engines.vllm.stack import VLLMStack, across_ranks
from cacheblend_rag.engines.vllm.wire import Order, SentChunk
from cacheblend_rag.errors import CacheBlendError, UnsupportedModelError
from cacheblend_rag.fusion.indexing import (
    Computed,
    DocumentPass,
    compute_chunks,
    compute_document,
    compute_one_by_one,
)
from cacheblend_rag.fusion.lead_in import LedChunk, PlacedChunk
from cacheblend_rag.fusion.prompt_pass import PromptPass, absence
from cacheblend_rag.kv.chunk_kv import KVKey, chunk_id, fingerprint
from cacheblend_rag.kv.store import TieredKVStore

logger = logging.getLogger(__name__)

Result = dict[str, Any]
Work = Generator[None, None, Result]

WARM_UP_TOKENS = 37
"""A size that no other dimension has: a compiler would take the two for one."""
MODES: tuple[AttentionMode, ...] = ("native", "sdpa")
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

    identity: what makes this worker's KV interchangeable with others', without the lead-in.
    Raises UnsupportedModelError when the model cannot be driven.
    """

    def __init__(
        self,
        vllm_config: Any,
        store: TieredKVStore,
        identity: dict[str, Any],
        namespace: str,
        mode: AttentionMode,
    ) -> None:
        context = vllm_config.compilation_config.static_forward_context
        attention = {name: layer for name, layer in context.items() if hasattr(layer, "impl")}
        self.stack = VLLMStack(attention, vllm_config)
        self.store, self.identity, self.namespace, self.mode = store, identity, namespace, mode
        self._block_size = int(vllm_config.cache_config.block_size)
        self._builder = _make_builder(vllm_config, self.stack)
        most = int(vllm_config.scheduler_config.max_num_batched_tokens)
        self._row_block = min(ROW_BLOCK, most)
        self._vocabulary = int(vllm_config.model_config.get_vocab_size())
        self._at_work: dict[str, Work] = {}
        self._worked: dict[str, float] = {}

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run a small pass, so that the first order does not wait for what is set up lazily.

        To be called while no request holds blocks: it writes into some.
        """
        ids = torch.arange(WARM_UP_TOKENS, device=self.stack.geometry.device)
        ids %= self._vocabulary
        tokens = ids.numel()
        cached = ids % 2 == 0
        blocks = range(1, 1 + -(-tokens // self._block_size))
        for mode in MODES if self.mode == "auto" else (self.mode,):
            fused = FusedKV(self.stack.geometry, tokens)
            fused.keys.zero_()
            fused.values.zero_()
            paged = PagedKV(
                self.stack.attention, self._builder, blocks, self._block_size, 0, tokens, mode
            )
            run = BlendPass(
                self.stack, ids, fused, Candidates(cached, cached, ids), REUSE_ONLY,
                needs_hidden=False, attention=paged.attend,
            )  # fmt: skip
            for layer in run.steps():
                if layer is not None:
                    paged.finish_layer(layer, fused)

    def start(self, job: Job) -> None:
        """Take a job on; ``advance`` works on it."""
        self._at_work[job.request_id] = self._work(job)
        self._worked[job.request_id] = 0.0

    def cancel(self, request_id: str) -> bool:
        """Give a job up; returns whether it was at work."""
        self._worked.pop(request_id, None)
        return self._at_work.pop(request_id, None) is not None

    def advance(
        self, seconds: float | None, only: str | None = None
    ) -> Iterator[tuple[str, Result]]:
        """Work for so long, oldest job first; yields jobs that are done, with their results."""
        until = math.inf if seconds is None else time.perf_counter() + seconds
        for request_id, work in list(self._at_work.items()):
            if only is not None and request_id != only:
                continue
            started = time.perf_counter()
            result = self._step(work, until)
            self._worked[request_id] += time.perf_counter() - started
            if result is None:
                return
            del self._at_work[request_id]
            yield request_id, {**result, "work_seconds": self._worked.pop(request_id)}

    @torch.inference_mode()
    def _step(self, work: Work, until: float) -> Result | None:
        """Run a job until it is done or time is up; None when it is not done.

        Ranks stop after the same step, since each step has all of them take part: the first one's
        clock decides, and a failure of one is a failure of all.
        """
        while True:
            result = _next_result(work)
            here = [result is not None and "error" in result, time.perf_counter() >= until]
            failed, late = self._agreed(here)
            if result is not None or failed:
                return result if result and ("error" in result or not failed) else dict(RANK_FAILED)
            if late:
                return None

    def _agreed(self, here: list[bool]) -> list[bool]:
        """Return whether any rank failed, and whether the first one's time is up."""
        ranks = get_tp_group()
        if ranks.world_size == 1:
            return here
        failed, late = here
        seen = torch.tensor([failed, late and ranks.is_first_rank], dtype=torch.int32)
        return [bool(flag) for flag in across_ranks(seen, "max").tolist()]

    def _work(self, job: Job) -> Work:
        model = self._fingerprint(job.order)
        if job.order.kind in {"evict", "prefetch"}:
            keys = [KVKey(chunk, model, context) for chunk, context in job.order.keys]
            do = _evict if job.order.kind == "evict" else _prefetch
            return (yield from do(self.store, keys))
        keys = [
            KVKey(chunk_id(job.tokens[c.start : c.end]), model, c.context_id)
            for c in job.order.chunks
        ]
        if job.order.kind == "precompute":
            return (yield from self._precompute(job, keys))
        return (yield from self._blend(job, keys))

    def _blend(self, job: Job, keys: Sequence[KVKey]) -> Work:
        started = time.perf_counter()
        placed = [
            PlacedChunk(key, chunk.start, chunk.end, chunk.protected)
            for key, chunk in zip(keys, job.order.chunks, strict=True)
        ]
        if refusal := self._too_little(placed, job.order.config.min_tokens):
            return refusal
        paged = PagedKV(
            self.stack.attention,
            self._builder,
            job.block_ids,
            self._block_size,
            job.first,
            job.until,
            self.mode,
        )
        ids = torch.tensor(job.tokens, device=self.stack.geometry.device)
        work = PromptPass(
            self.stack,
            ids,
            placed,
            self.store,
            job.order.config,
            needs_hidden=False,
            until=job.until,
            attention=paged.attend,
            on_layer=paged.finish_layer,
            row_block=self._row_block,
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

    def _too_little(self, placed: Sequence[PlacedChunk], least: int) -> Result | None:
        """Say why so few stored chunk tokens are not worth blending; None when they are."""
        held = on_all_ranks(self.stack, [self.store.contains(c.key) for c in placed])
        stored = sum(c.end - c.start for c, there in zip(placed, held, strict=True) if there)
        if stored and stored >= least:
            return None
        if stored:
            reason = f"{stored} chunk tokens are stored, fewer than min_tokens={least}"
        else:
            reason = "no chunk of the prompt is stored"
        missed = [c.report("too short" if stored else absence(self.store, c.key)) for c in placed]
        return {"reason": reason, "chunks": [asdict(chunk) for chunk in missed]}

    def _precompute(self, job: Job, keys: Sequence[KVKey]) -> Work:
        led = [_led(job, chunk, key) for key, chunk in zip(keys, job.order.chunks, strict=True)]
        stored = computed = tokens = 0
        if job.order.lead_in.name == "document":
            starts = [chunk.start for chunk in job.order.chunks]
            document = DocumentPass(list(job.tokens), list(zip(led, starts, strict=True)))
            work = compute_document(self.stack, document, self.store, self._row_block)
        else:
            work = compute_chunks(
                self.stack,
                led,
                self.store,
                alone=self._compute_alone,
                in_document=False,
                row_block=self._row_block,
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

    def _compute_alone(self, chunks: list[LedChunk]) -> Computed:
        return compute_one_by_one(self.stack, chunks, self.store, self._row_block)

    def _fingerprint(self, order: Order) -> str:
        lead = order.lead_in
        parts = {"lead_in": lead.name, "lead_tokens": lead.tokens, "window": lead.window}
        return fingerprint({**self.identity, **parts}, self.namespace)


def _next_result(work: Work) -> Result | None:
    """Do a job's next step; its result when that was the last one, or when it failed."""
    try:
        next(work)
    except StopIteration as done:
        return dict(done.value)
    except CacheBlendError as error:
        return {"error": str(error)}
    except Exception as error:  # one request's failure must not end the server
        logger.exception("a request could not be blended")
        return {"error": f"blending failed: {type(error).__name__}"}
    return None


def _led(job: Job, chunk: SentChunk, key: KVKey) -> LedChunk:
    return LedChunk(
        token_ids=job.tokens[chunk.start : chunk.end],
        lead=job.tokens[: chunk.context_start],
        context=job.tokens[chunk.context_start : chunk.start],
        key=key,
    )


def _evict(store: TieredKVStore, keys: Sequence[KVKey]) -> Work:
    yield
    return {"evicted": sum(store.evict(key) for key in keys)}


def _prefetch(store: TieredKVStore, keys: Sequence[KVKey]) -> Work:
    yield
    store.prefetch(keys)
    return {}


def _make_builder(vllm_config: Any, stack: VLLMStack) -> Any:
    """Return the attention backend's builder of metadata, one for all layers."""
    backends = {layer.attn_backend for layer in stack.attention}
    if len(backends) != 1:
        raise UnsupportedModelError("layers of this model use several attention backends")
    spec = stack.attention[0].get_kv_cache_spec(vllm_config)
    device = stack.geometry.device
    return backends.pop().get_builder_cls()(spec, stack.names, vllm_config, device)
