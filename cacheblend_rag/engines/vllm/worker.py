"""Blender: does the connector's orders inside a vLLM worker, a layer at a time."""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from cacheblend_rag.engines.vllm.paged import AttentionMode, PagedKV
from cacheblend_rag.engines.vllm.stack import VLLMStack
from cacheblend_rag.engines.vllm.wire import Order, SentChunk
from cacheblend_rag.errors import CacheBlendError, UnsupportedModelError
from cacheblend_rag.fusion.indexing import DocumentPass, compute_document, compute_one_by_one
from cacheblend_rag.fusion.lead_in import LedChunk, PlacedChunk
from cacheblend_rag.fusion.prompt_pass import PromptPass
from cacheblend_rag.kv.chunk_kv import KVKey, chunk_id, fingerprint
from cacheblend_rag.kv.store import TieredKVStore

logger = logging.getLogger(__name__)

Result = dict[str, Any]
Work = Generator[None, None, Result]


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
        model = vllm_config.model_config
        self.stack = VLLMStack(attention, model.get_hidden_size(), model.dtype)
        self.store, self.identity, self.namespace, self.mode = store, identity, namespace, mode
        self._block_size = int(vllm_config.cache_config.block_size)
        self._builder = _make_builder(vllm_config, self.stack)
        self._row_block = min(512, int(vllm_config.scheduler_config.max_num_batched_tokens))
        self._at_work: dict[str, Work] = {}

    def start(self, job: Job) -> None:
        """Take a job on; ``advance`` works on it."""
        self._at_work[job.request_id] = self._work(job)

    def cancel(self, request_id: str) -> bool:
        """Give a job up; returns whether it was at work."""
        return self._at_work.pop(request_id, None) is not None

    def advance(
        self, seconds: float | None, only: str | None = None
    ) -> Iterator[tuple[str, Result]]:
        """Work for so long, oldest job first; yields jobs that are done, with their results."""
        until = None if seconds is None else time.perf_counter() + seconds
        for request_id, work in list(self._at_work.items()):
            if only is not None and request_id != only:
                continue
            result = self._step(work, until)
            if result is None:
                return
            del self._at_work[request_id]
            yield request_id, result

    @torch.inference_mode()
    def _step(self, work: Work, until: float | None) -> Result | None:
        """Run a job until it is done or time is up; None when it is not done."""
        while True:
            try:
                next(work)
            except StopIteration as done:
                return dict(done.value)
            except CacheBlendError as error:
                return {"error": str(error)}
            except Exception as error:  # one request's failure must not end the server
                logger.exception("a request could not be blended")
                return {"error": f"blending failed: {type(error).__name__}"}
            if until is not None and time.perf_counter() >= until:
                return None

    def _work(self, job: Job) -> Work:
        model = self._fingerprint(job.order)
        if job.order.kind in {"evict", "prefetch"}:
            keys = [KVKey(chunk, model, context) for chunk, context in job.order.keys]
            return (_evict if job.order.kind == "evict" else _prefetch)(self.store, keys)
        keys = [
            KVKey(chunk_id(job.tokens[c.start : c.end]), model, c.context_id)
            for c in job.order.chunks
        ]
        if job.order.kind == "precompute":
            return self._precompute(job, keys)
        return self._blend(job, keys)

    def _blend(self, job: Job, keys: Sequence[KVKey]) -> Work:
        started = time.perf_counter()
        paged = PagedKV(
            self.stack.attention,
            self._builder,
            job.block_ids,
            self._block_size,
            job.first,
            job.until,
            self.mode,
        )
        placed = [
            PlacedChunk(key, chunk.start, chunk.end, chunk.protected)
            for key, chunk in zip(keys, job.order.chunks, strict=True)
        ]
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

    def _precompute(self, job: Job, keys: Sequence[KVKey]) -> Work:
        led = [_led(job, chunk, key) for key, chunk in zip(keys, job.order.chunks, strict=True)]
        stored = computed = tokens = 0
        if job.order.lead_in.name == "document":
            starts = [chunk.start for chunk in job.order.chunks]
            document = DocumentPass(list(job.tokens), list(zip(led, starts, strict=True)))
            work = compute_document(self.stack, document, self.store)
        else:
            work = compute_one_by_one(
                self.stack, [chunk for chunk in led if not self.store.contains(chunk.key)]
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
        return {
            "computed": stored,
            "skipped": len(keys) - computed,
            "computed_tokens": tokens,
            "refused": refused,
        }

    def _fingerprint(self, order: Order) -> str:
        lead = order.lead_in
        parts = {"lead_in": lead.name, "lead_tokens": lead.tokens, "window": lead.window}
        return fingerprint({**self.identity, **parts}, self.namespace)


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
