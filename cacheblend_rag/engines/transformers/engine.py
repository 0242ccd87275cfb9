"""TransformersEngine: precompute, blend and answer on any Hugging Face decoder, in process."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from cacheblend_rag.blend import plan_schedule
from cacheblend_rag.blend.steps import Steps
from cacheblend_rag.blend.trial import key_traits, trial_tokens
from cacheblend_rag.config import BlendConfig, LeadInConfig
from cacheblend_rag.engines.base import (
    FULL_PREFILL,
    Delta,
    FinishReason,
    Generation,
    PromptLike,
    SamplingParams,
)
from cacheblend_rag.engines.exiting import working
from cacheblend_rag.engines.front import (
    FORGOTTEN,
    EngineFront,
    Item,
    PreparedPrompt,
    checked,
    settled,
)
from cacheblend_rag.engines.identity import model_identity
from cacheblend_rag.engines.naming import public_name
from cacheblend_rag.engines.transformers import loading
from cacheblend_rag.engines.transformers.batches import compute_batches
from cacheblend_rag.engines.transformers.cache import GROWTH_TOKENS
from cacheblend_rag.engines.transformers.decoding import Sampler, TextStream
from cacheblend_rag.engines.transformers.ordinary import find_ordinary_prefill
from cacheblend_rag.engines.transformers.prefill import (
    Prefilled,
    PromptChunks,
    blended_prefill,
    ordinary_prefill,
)
from cacheblend_rag.engines.transformers.stack import TransformersStack
from cacheblend_rag.engines.transformers.support import open_stack
from cacheblend_rag.errors import ConfigError, UnsupportedModelError
from cacheblend_rag.kv.chunk_kv import ChunkKV, KVKey
from cacheblend_rag.kv.fetch import Fetch
from cacheblend_rag.kv.store import TieredKVStore
from cacheblend_rag.prefill.blended import Stopwatch
from cacheblend_rag.prefill.lead_in import ChunkPlan, LeadIn
from cacheblend_rag.prefill.policy import too_little
from cacheblend_rag.prefill.precompute import Computed, compute_chunks
from cacheblend_rag.report import (
    BlendReport,
    MissReason,
    PhaseSeconds,
    PrecomputeReport,
    reused_and_recomputed,
)
from cacheblend_rag.text.chunk import Chunk
from cacheblend_rag.text.encoder import Tokenizer
from cacheblend_rag.text.prompt import EncodedPrompt
from cacheblend_rag.text.registry import ChunkRegistry

logger = logging.getLogger(__name__)

ASYNC_THREADS = 32
PART_CHUNKS = 64
PATIENCE_SECONDS = 0.05
"""How long a request waits for the store before it looks whether it was cancelled."""

_locks: WeakKeyDictionary[PreTrainedModel, threading.RLock] = WeakKeyDictionary()
_locks_lock = threading.Lock()

T = TypeVar("T")


@dataclass
class _Request:
    """One request on its way: what was asked, and how it is to be served."""

    prepared: PreparedPrompt
    sampling: SamplingParams
    config: BlendConfig
    full: bool
    cancel: Event

    @property
    def prompt(self) -> EncodedPrompt:
        return self.prepared.prompt


class TransformersEngine(EngineFront):
    """The embedded engine.

    model: a hub name, a local folder in hub format, ``demo`` (the bundled model), or a loaded
        causal language model.
    tokenizer: the model's own by default; must be given with a loaded model.
    config: defaults of every request. lead_in: what chunks are computed behind, as settings or by
        its kind's name.
    store: where chunk KV is kept; by default 4 GiB of host memory.
    registry: known chunks; several engines may share one.
    instruction: what prompts say before their first chunk; lead-ins ``instruction`` and
        ``document`` compute chunks behind it. A function is given the tokenizer and returns it.
    namespace: tenants with different namespaces never share KV.
    device, dtype: where and in what precision a model given by name is loaded.

    Safe to share between threads: requests take turns, one layer or decode step at a time, also
    those of other engines around the same model. Nothing else may use the model meanwhile.

    Raises ModelLoadError when the model or tokenizer cannot be loaded, ConfigError when the config
    does not suit the model. A model that cannot be blended is served by ordinary prefill;
    ``blend_refusal`` says why.
    """

    name = "transformers"

    def __init__(
        self,
        model: str | Path | PreTrainedModel,
        *,
        tokenizer: Any = None,
        config: BlendConfig | None = None,
        store: TieredKVStore | None = None,
        registry: ChunkRegistry | None = None,
        instruction: str | Callable[[Tokenizer], str] = "",
        namespace: str = "default",
        lead_in: LeadInConfig | str | None = None,
        device: str | None = None,
        dtype: str | torch.dtype | None = None,
    ) -> None:
        config, lead_in = settled(config, lead_in)
        if isinstance(model, PreTrainedModel):
            if tokenizer is None:
                raise ConfigError("tokenizer must be given together with a loaded model")
            self.model = loading.prepare(model)
            name = model.config.name_or_path or model.config.model_type
        else:
            self.model = loading.load_model(model, loading.pick_device(device), dtype)
            tokenizer = tokenizer or loading.load_tokenizer(model)
            name = str(model)
        super().__init__(tokenizer, config, registry, instruction, lead_in)
        self.model_name = public_name(name)
        self.store = TieredKVStore.open() if store is None else store
        self.blend_refusal: str | None = None
        self._stack: TransformersStack | None = None
        try:
            self._stack = open_stack(self.model)
            self._ordinary = find_ordinary_prefill(self.model, self._stack)
        except UnsupportedModelError as error:
            self._stack, self.blend_refusal = None, str(error)
            logger.warning("blending is off for this model: %s", error)
            self._ordinary = find_ordinary_prefill(self.model, None)
        if self._stack is not None:
            plan_schedule(self.config, self._stack.geometry.layers)
        self._lead_in = LeadIn(
            self.encoder,
            self.lead_in,
            instruction=self.instruction,
            namespace=namespace,
            identity=self._identity(None if model is self.model else model),
        )
        self._lock = _lock_of(self.model)
        self._pool = ThreadPoolExecutor(ASYNC_THREADS, thread_name_prefix="cacheblend")
        self._eos = _eos_token_ids(self.model, self.tokenizer)
        self._is_open = True

    @property
    def is_open(self) -> bool:
        """Whether ``close`` has yet to be called."""
        return self._is_open

    @property
    def context_window(self) -> int:
        """Most tokens a prompt and its answer may hold together."""
        return loading.context_window(self.model)

    # Index time

    def precompute(self, items: Iterable[Item], *, progress: bool = True) -> PrecomputeReport:
        """Register chunks and store their KV; what is stored already is skipped.

        A Document replaces what was known of its document_id in its collection before this call:
        chunks that it no longer has are forgotten and their KV dropped. Several Documents with one
        document_id in a call are variants of it and stand side by side. Chunks that are empty or
        longer than the context window are refused and counted. Each chunk is stored as soon as it
        is computed, so an interrupted run goes on where it stopped.
        """
        started = time.perf_counter()
        counts: Counter[str] = Counter()
        refused: Counter[str] = Counter()
        chunks, replaced = self._register_current(items, refused)
        with tqdm(total=len(chunks), desc="precompute", unit="chunk", disable=not progress) as bar:
            for part in _whole_documents(chunks, PART_CHUNKS):
                wanted: dict[KVKey, ChunkPlan] = {}
                for chunk in part:
                    reason, led = self._admit(chunk)
                    if led is None:
                        refused[reason] += 1
                    elif self.store.contains(led.key) or led.key in wanted:
                        counts["skipped"] += 1
                    if led is not None:
                        wanted[led.key] = led
                for led, kv in self._compute(list(wanted.values())):
                    if self.store.put(led.key, kv):
                        counts["computed"] += 1
                        counts["tokens"] += kv.tokens
                    else:
                        refused["store full"] += 1
                refused[FORGOTTEN] += self._drop_forgotten(part)
                bar.update(len(part))
        return PrecomputeReport(
            computed=counts["computed"],
            skipped=counts["skipped"],
            computed_tokens=counts["tokens"],
            seconds=time.perf_counter() - started,
            refused=dict(+refused),
            replaced=replaced,
        )

    def prefetch(self, hints: Iterable[Chunk | str]) -> None:
        """Start loading chunks (or all chunks of a document, by id) into the fastest tier."""
        self.store.prefetch([self._lead_in.key(chunk) for chunk in self._hinted(hints)])

    def evict_unregistered(self) -> int:
        """Drop the chunk KV of this engine's fingerprint that no registered chunk has.

        Writers that are killed, or change a registry that others index from, can leave some.
        Returns how many were dropped. Raises StoreError when the registry cannot be read.
        """
        self._check_open()
        stored = [key for key in self.store.entries() if key.fingerprint == self.fingerprint]
        self.registry.refresh()
        known = {self._lead_in.key(chunk) for chunk in self.registry.chunks()}
        return sum(self.store.evict(key) for key in stored if key not in known)

    # Question time

    def generate(
        self,
        prompt: PromptLike,
        sampling: SamplingParams | None = None,
        *,
        config: BlendConfig | None = None,
        hints: Sequence[Chunk | str] = (),
        cancel: Event | None = None,
    ) -> Generation:
        """Answer one prompt.

        hints: chunks, or ids of documents, that the prompt is known to hold. cancel: set it to stop
        the work; what was generated so far is returned. Raises PromptError when the prompt is empty
        or longer than the context window, ConfigError when ``config`` does not suit the model.
        """
        return _last(self.stream(prompt, sampling, config=config, hints=hints, cancel=cancel))

    def generate_full(
        self,
        prompt: PromptLike,
        sampling: SamplingParams | None = None,
        *,
        hints: Sequence[Chunk | str] = (),
    ) -> Generation:
        """Answer by ordinary prefill of the same tokens: the baseline to compare with.

        hints: as given to generate, since they decide where a prompt is cut, hence its tokens.
        """
        request = self._prepare(prompt, sampling, None, hints, None, full=True)
        return _last(self._serve(request))

    def stream(
        self,
        prompt: PromptLike,
        sampling: SamplingParams | None = None,
        *,
        config: BlendConfig | None = None,
        hints: Sequence[Chunk | str] = (),
        cancel: Event | None = None,
    ) -> Iterator[Delta]:
        """Answer piece by piece; closing the iterator stops the work. Raises as generate."""
        return self._serve(self._prepare(prompt, sampling, config, hints, cancel))

    def generate_batch(
        self,
        prompts: Sequence[PromptLike],
        sampling: SamplingParams | None = None,
        *,
        config: BlendConfig | None = None,
        hints: Sequence[Chunk | str] = (),
    ) -> list[Generation]:
        """Answer several prompts, in order; all are checked before the first is served."""
        requests = [self._prepare(prompt, sampling, config, hints, None) for prompt in prompts]
        return [_last(self._serve(request)) for request in requests]

    async def agenerate(
        self,
        prompt: PromptLike,
        sampling: SamplingParams | None = None,
        *,
        config: BlendConfig | None = None,
        hints: Sequence[Chunk | str] = (),
    ) -> Generation:
        """As generate, off the event loop; cancelling the task stops the work."""
        cancel = Event()

        def work() -> Generation:
            return self.generate(prompt, sampling, config=config, hints=hints, cancel=cancel)

        self._check_open()
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        except asyncio.CancelledError:
            cancel.set()
            raise

    async def astream(
        self,
        prompt: PromptLike,
        sampling: SamplingParams | None = None,
        *,
        config: BlendConfig | None = None,
        hints: Sequence[Chunk | str] = (),
    ) -> AsyncIterator[Delta]:
        """As stream, off the event loop; leaving the loop over it stops the work."""
        loop, cancel = asyncio.get_running_loop(), Event()
        arrived: asyncio.Queue[Delta | BaseException | None] = asyncio.Queue()

        def deliver(item: Delta | BaseException | None) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(arrived.put_nowait, item)

        def work() -> None:
            try:
                for delta in self.stream(
                    prompt, sampling, config=config, hints=hints, cancel=cancel
                ):
                    deliver(delta)
                deliver(None)
            except BaseException as error:
                deliver(error)

        self._check_open()
        self._pool.submit(work)
        try:
            while (item := await arrived.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            cancel.set()

    def close(self) -> None:
        """Stop background threads and close the store; the engine may not be used afterwards."""
        self._is_open = False
        self._pool.shutdown(wait=True, cancel_futures=True)
        self.store.close()

    # Inside

    def _identity(self, name: str | Path | None) -> dict[str, Any]:
        """Return what KV of this model depends on; name: what it was loaded by, if it was."""
        weights = loading.weights_identity(self.model, name)
        keys: list[int] = []
        if self._stack is not None:
            ids = trial_tokens(
                int(self.model.config.get_text_config().vocab_size), self.model.device
            )
            with torch.no_grad():
                keys = key_traits(self._stack, ids)
        return model_identity(weights, self.model.config, self.model.dtype, keys=keys)

    def _admit(self, chunk: Chunk) -> tuple[str, ChunkPlan | None]:
        """Return the chunk ready to be computed, or the reason why it will not be."""
        if self._stack is None:
            return "unsupported model", None
        led = self._lead_in.resolve(chunk)
        behind = led.context if self._lead_in.name == "document" else ()
        if not led.token_ids:
            return "empty text", None
        if len(led.lead) + len(behind) + len(led.token_ids) > self.context_window:
            return "longer than the context window", None
        return "", led

    def _compute(self, wanted: list[ChunkPlan]) -> Iterator[tuple[ChunkPlan, ChunkKV]]:
        """Compute the KV of all that is not stored, a layer or batch at a time."""
        stack = self._stack
        if stack is None:
            return
        work: Computed = compute_chunks(
            stack,
            wanted,
            self.store,
            alone=lambda chunks: compute_batches(stack, chunks),
            in_document=self._lead_in.name == "document",
        )
        for computed in self._taking_turns(work):
            if computed is not None:
                yield computed

    def _taking_turns(self, steps: Iterator[T]) -> Iterator[T]:
        """Run each step alone and without gradients, letting other requests run in between."""
        while True:
            with working(), self._lock, torch.no_grad():
                try:
                    item = next(steps)
                except StopIteration:
                    return
            yield item

    def _evict(self, chunks: Sequence[Chunk]) -> int:
        return sum(self.store.evict(self._lead_in.key(chunk)) for chunk in chunks)

    def _prepare(
        self,
        prompt: PromptLike,
        sampling: SamplingParams | None,
        config: BlendConfig | None,
        hints: Sequence[Chunk | str],
        cancel: Event | None,
        *,
        full: bool = False,
    ) -> _Request:
        """Check and tokenize; raises PromptError and ConfigError before any work is done."""
        config, sampling = checked(config or self.config), sampling or SamplingParams()
        if self._stack is not None:
            plan_schedule(config, self._stack.geometry.layers)
        with working():
            prepared = self._prepare_prompt(prompt, sampling, hints)
        return _Request(prepared, sampling, config, full, cancel or Event())

    def _serve(self, request: _Request) -> Iterator[Delta]:
        """Prefill, then decode; yields text as it becomes final."""
        prefilled = self._prefilled(request)
        text = TextStream(self.tokenizer, request.sampling.stop)
        if prefilled is None:
            yield Delta("", self._generation(request, None, text, "cancelled"))
            return
        reason: FinishReason = "length"
        piece = ""
        for token in self._tokens(request, prefilled):
            if token in self._eos and not request.sampling.ignore_eos:
                reason = "stop"
                break
            with working():
                piece = text.feed(token)
            if text.stopped:
                reason = "stop"
                break
            if request.cancel.is_set():
                reason = "cancelled"
                break
            if piece:
                yield Delta(piece)
                piece = ""
        yield Delta(piece + text.finish(), self._generation(request, prefilled, text, reason))

    def _prefilled(self, request: _Request) -> Prefilled | None:
        """Prefill a step at a time, blended where there is something to reuse; None when cancelled.

        The store is asked, and waited for, while others may have the model.
        """
        chunks = PromptChunks(request.prompt, self._lead_in, self.store)
        reserve = min(request.prepared.max_tokens, GROWTH_TOKENS)
        refusal, miss = self._refusal(request, chunks)
        if refusal is None and self._stack is not None:
            with chunks.fetch() as fetch:
                steps = blended_prefill(self._stack, chunks, fetch, request.config, reserve)
                return self._stepped(request, steps, fetch)
        steps = ordinary_prefill(self._ordinary, request.prompt.token_ids, reserve)
        prefilled = self._stepped(request, steps)
        if prefilled is not None:
            prefilled.reason = refusal
            prefilled.chunks = [] if request.full else chunks.missed(miss)
        return prefilled

    def _stepped(
        self, request: _Request, steps: Steps, fetch: Fetch | None = None
    ) -> Prefilled | None:
        """Run each step alone, and wait in between for the chunk that the next one takes."""
        while not request.cancel.is_set():
            with working(), self._lock, torch.no_grad():
                try:
                    next(steps)
                except StopIteration as done:
                    return cast(Prefilled, done.value)
            while fetch and not (fetch.wait(PATIENCE_SECONDS) or request.cancel.is_set()):
                pass
        return None

    def _refusal(
        self, request: _Request, chunks: PromptChunks
    ) -> tuple[str | None, MissReason | None]:
        """Why the prompt is not blended, and what to say of its chunks; (None, None) when it is."""
        if request.full:
            return FULL_PREFILL, None
        if not request.prompt.spans:
            return "no known chunk in the prompt", None
        if self._stack is None:
            return f"unsupported model: {self.blend_refusal}", "unsupported model"
        refused = too_little(chunks.stored_tokens(), request.config.min_tokens)
        return refused or (None, None)

    def _tokens(self, request: _Request, prefilled: Prefilled) -> Iterator[int]:
        """Draw at most max_tokens tokens, each decoded from the one before it."""
        watch = Stopwatch(self.model.device, prefilled.seconds)
        sampler = Sampler(request.sampling, self.model.device)
        token_ids, logits = list(request.prompt.token_ids), prefilled.logits
        for index in range(request.prepared.max_tokens):
            with working():
                if index:
                    with self._lock, torch.no_grad():
                        logits = self._ordinary.decode(prefilled.cache, token_ids)
                token_ids.append(sampler.draw(logits, token_ids))
            watch.lap("decode" if index else "first_token")
            yield token_ids[-1]
            watch.skip()

    def _generation(
        self,
        request: _Request,
        prefilled: Prefilled | None,
        text: TextStream,
        reason: FinishReason,
    ) -> Generation:
        tokens = len(request.prompt.token_ids)
        answer = Generation(
            text=text.text,
            token_ids=tuple(text.token_ids),
            finish_reason=reason,
            prompt_tokens=tokens,
            report=self._report(request, prefilled),
        )
        return self._told(request.prepared, answer)

    def _report(self, request: _Request, prefilled: Prefilled | None) -> BlendReport:
        tokens = len(request.prompt.token_ids)
        done = prefilled or Prefilled.nothing()
        reused, recomputed = reused_and_recomputed(done.chunks)
        return BlendReport(
            engine=self.name,
            blended=done.blended,
            reason=done.reason,
            prompt_tokens=tokens,
            reused_tokens=reused,
            recomputed_tokens=recomputed,
            computed_tokens=0 if prefilled is None else tokens - reused - recomputed,
            recompute_ratio=done.ratio,
            selector=done.selector,
            lead_in=self._lead_in.name,
            compute_share=done.compute_share,
            seconds=PhaseSeconds(prepare=request.prepared.prepare_seconds, **done.seconds),
            chunks=(*done.chunks, *request.prepared.unmatched),
            selector_reason=done.selector_reason,
        )


def _lock_of(model: PreTrainedModel) -> threading.RLock:
    """The lock of all engines around a model: driving its layers alters it for a moment."""
    with _locks_lock:
        return _locks.setdefault(model, threading.RLock())


def _whole_documents(chunks: Sequence[Chunk], size: int) -> Iterator[list[Chunk]]:
    """Cut chunks into parts of at least ``size``, never between a chunk and what precedes it."""
    part: list[Chunk] = []
    for chunk in chunks:
        if len(part) >= size and not chunk.context:
            yield part
            part = []
        part.append(chunk)
    if part:
        yield part


def _last(deltas: Iterator[Delta]) -> Generation:
    """Run a stream to its end and return the whole answer."""
    *_, last = deltas
    return cast(Generation, last.generation)


def _eos_token_ids(model: PreTrainedModel, tokenizer: Any) -> frozenset[int]:
    """Every token that ends an answer, as generation config and tokenizer name them."""
    named = getattr(model.generation_config, "eos_token_id", None)
    ids = list(named) if isinstance(named, list | tuple) else [named]
    return frozenset(i for i in [*ids, tokenizer.eos_token_id] if i is not None)
