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
from cacheblend_rag.chunks import Chunk, ChunkRegistry, Document
from cacheblend_rag.config import BlendConfig
from cacheblend_rag.engines.base import (
    BlendReport,
    Delta,
    FinishReason,
    Generation,
    PhaseSeconds,
    PrecomputeReport,
    PromptLike,
    SamplingParams,
)
from cacheblend_rag.engines.transformers import loading
from cacheblend_rag.engines.transformers.batches import compute_batches
from cacheblend_rag.engines.transformers.cache import GROWTH_TOKENS
from cacheblend_rag.engines.transformers.decoding import Sampler, TextStream
from cacheblend_rag.engines.transformers.prefill import (
    Prefilled,
    PromptChunks,
    Steps,
    blended_prefill,
    decode,
    ordinary_prefill,
)
from cacheblend_rag.engines.transformers.stack import TransformersStack
from cacheblend_rag.engines.transformers.support import blend_refusal
from cacheblend_rag.errors import ConfigError, PromptError
from cacheblend_rag.fusion.indexing import Computed, compute_chunks
from cacheblend_rag.fusion.lead_in import LeadIn, LedChunk
from cacheblend_rag.fusion.prompt_pass import Stopwatch
from cacheblend_rag.kv.chunk_kv import ChunkKV, KVKey
from cacheblend_rag.kv.store import TieredKVStore
from cacheblend_rag.prompt import BlendPrompt, EncodedPrompt, Tokenizer, tokenize_chunk
from cacheblend_rag.reports import ChunkReport, MissReason

logger = logging.getLogger(__name__)

ASYNC_THREADS = 32
PART_CHUNKS = 64

_locks: WeakKeyDictionary[PreTrainedModel, threading.RLock] = WeakKeyDictionary()
_locks_lock = threading.Lock()

Item = Chunk | Document | str
T = TypeVar("T")


@dataclass
class _Request:
    """One request on its way: what was asked, and how it is to be served."""

    prompt: EncodedPrompt
    sampling: SamplingParams
    config: BlendConfig
    max_tokens: int
    unmatched: list[ChunkReport]
    full: bool
    prepare_seconds: float
    cancel: Event


class TransformersEngine:
    """The embedded engine.

    model: a hub name, a local folder in hub format, or a loaded causal language model.
    tokenizer: the model's own by default; must be given with a loaded model.
    config: defaults of every request. Its lead-in fields hold for the engine's lifetime.
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
        device: str | None = None,
        dtype: str | torch.dtype | None = None,
    ) -> None:
        self.config = config or BlendConfig()
        if isinstance(model, PreTrainedModel):
            if tokenizer is None:
                raise ConfigError("tokenizer must be given together with a loaded model")
            self.model = loading.prepare(model)
            self.tokenizer = tokenizer
            name = model.config.name_or_path or model.config.model_type
        else:
            self.model = loading.load_model(model, loading.pick_device(device), dtype)
            self.tokenizer = tokenizer = tokenizer or loading.load_tokenizer(model)
            name = str(model)
        self.model_name = loading.public_name(name)
        self.instruction = instruction if isinstance(instruction, str) else instruction(tokenizer)
        self.registry = ChunkRegistry() if registry is None else registry
        self.store = TieredKVStore.open() if store is None else store
        self.blend_refusal = blend_refusal(self.model)
        self._stack = None if self.blend_refusal else TransformersStack(self.model)
        if self.blend_refusal:
            logger.warning("blending is off for this model: %s", self.blend_refusal)
        if self._stack is not None:
            plan_schedule(self.config, self._stack.geometry.layers)
        self._lead_in = LeadIn(
            self.tokenizer,
            self.config,
            instruction=self.instruction,
            namespace=namespace,
            identity={
                "weights": loading.weights_identity(self.model),
                "model_type": self.model.config.model_type,
                "rope": getattr(self.model.config.get_text_config(), "rope_parameters", None),
                "vocabulary": len(self.tokenizer),
                "tensor_parallel": [0, 1],
            },
        )
        self._lock = _lock_of(self.model)
        self._pool = ThreadPoolExecutor(ASYNC_THREADS, thread_name_prefix="cacheblend")
        self._eos = _eos_token_ids(self.model, self.tokenizer)

    @property
    def context_window(self) -> int:
        """Most tokens a prompt and its answer may hold together."""
        return loading.context_window(self.model)

    @property
    def fingerprint(self) -> str:
        """What this engine's chunk KV is stored under: model, tokenizer, lead-in, namespace."""
        return self._lead_in.fingerprint

    @property
    def has_chat_template(self) -> bool:
        """Whether prompts may be chat messages."""
        return bool(getattr(self.tokenizer, "chat_template", None))

    def tokenize(self, text: str) -> tuple[int, ...]:
        """Return the tokens of ``text`` alone; raises PromptError on unpaired surrogates."""
        return tokenize_chunk(self.tokenizer, text)

    # Index time

    def register(self, items: Iterable[Item]) -> None:
        """Make chunks known without computing anything; raises PromptError on empty text."""
        self.registry.add_many([chunk for item in items for chunk in _chunks(item)])

    def precompute(self, items: Iterable[Item], *, progress: bool = True) -> PrecomputeReport:
        """Register chunks and store their KV; what is stored already is skipped.

        A Document replaces what was known of its document_id before this call: chunks that it no
        longer has are forgotten and their KV dropped. Several Documents with one document_id in a
        call are variants of it and stand side by side. Chunks that are empty or longer than the
        context window are refused and counted. Each chunk is stored as soon as it is computed, so
        an interrupted run goes on where it stopped.
        """
        started = time.perf_counter()
        counts: Counter[str] = Counter()
        refused: Counter[str] = Counter()
        chunks = self._register_current(items, refused)
        with tqdm(total=len(chunks), desc="precompute", unit="chunk", disable=not progress) as bar:
            for part in _whole_documents(chunks, PART_CHUNKS):
                wanted: dict[KVKey, LedChunk] = {}
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
                bar.update(len(part))
        return PrecomputeReport(
            computed=counts["computed"],
            skipped=counts["skipped"],
            computed_tokens=counts["tokens"],
            seconds=time.perf_counter() - started,
            refused=dict(refused),
        )

    def prefetch(self, hints: Iterable[Chunk | str]) -> None:
        """Start loading chunks (or all chunks of a document, by id) into the fastest tier."""
        keys = []
        for hint in hints:
            chunks = self.registry.document(hint) if isinstance(hint, str) else (hint,)
            keys += [self._lead_in.key(chunk) for chunk in chunks]
        self.store.prefetch(keys)

    def evict_document(self, document_id: str) -> int:
        """Forget a document's chunks and drop their KV; returns how many were dropped."""
        return sum(self._drop(chunk) for chunk in self.registry.remove_document(document_id))

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
        self, prompt: PromptLike, sampling: SamplingParams | None = None
    ) -> Generation:
        """Answer by ordinary prefill of the same tokens: the baseline to compare with."""
        request = self._prepare(prompt, sampling, None, (), None, full=True)
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

        self._pool.submit(work)
        try:
            while (item := await arrived.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            cancel.set()

    def close(self) -> None:
        """Stop background threads and close the store."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self.store.close()

    # Inside

    def _register_current(self, items: Iterable[Item], refused: Counter[str]) -> list[Chunk]:
        """Register items, dropping what a newer version of a document no longer holds."""
        given: list[Chunk] = []
        documents: dict[str, None] = {}
        for item in items:
            for chunk in _chunks(item):
                if chunk.text.strip():
                    given.append(chunk)
                else:
                    refused["empty text"] += 1
            if isinstance(item, Document):
                documents[item.document_id] = None
        current = set(given)
        stale = [c for name in documents for c in self.registry.document(name) if c not in current]
        if stale:
            self.registry.discard_many(stale)
        self.registry.add_many(given)
        for chunk in stale:
            self._drop(chunk)
        return given

    def _admit(self, chunk: Chunk) -> tuple[str, LedChunk | None]:
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

    def _compute(self, wanted: list[LedChunk]) -> Iterator[tuple[LedChunk, ChunkKV]]:
        """Compute the KV of all that is not stored, a layer or batch at a time."""
        if self._stack is None:
            return
        work: Computed = compute_chunks(
            self._stack,
            wanted,
            self.store,
            alone=lambda chunks: compute_batches(self.model, chunks),
            in_document=self._lead_in.name == "document",
        )
        for computed in self._taking_turns(work):
            if computed is not None:
                yield computed

    def _taking_turns(self, steps: Iterator[T]) -> Iterator[T]:
        """Run each step alone and without gradients, letting other requests run in between."""
        while True:
            with self._lock, torch.no_grad():
                try:
                    item = next(steps)
                except StopIteration:
                    return
            yield item

    def _drop(self, chunk: Chunk) -> bool:
        """Evict the KV of a chunk no longer registered, unless another chunk shares it."""
        key = self._lead_in.key(chunk)
        if any(self._lead_in.key(other) == key for other in self.registry.variants(chunk.text)):
            return False
        return self.store.evict(key)

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
        """Segment and tokenize; raises PromptError and ConfigError before any work is done."""
        started = time.perf_counter()
        config, sampling = config or self.config, sampling or SamplingParams()
        if self._stack is not None:
            plan_schedule(config, self._stack.geometry.layers)
        segmented = self._segments(prompt, hints)
        encoded = segmented.encode(self.tokenizer)
        room = self.context_window - len(encoded.token_ids)
        if not segmented.segments or not encoded.token_ids:
            raise PromptError("prompt is empty: give at least one token")
        if room < 1:
            raise PromptError(
                f"prompt holds {len(encoded.token_ids)} tokens, the context window is "
                f"{self.context_window}: retrieve fewer chunks or shorten the question"
            )
        return _Request(
            prompt=encoded,
            sampling=sampling,
            config=config,
            max_tokens=min(sampling.max_tokens, room),
            unmatched=self._unmatched(encoded, hints),
            full=full,
            prepare_seconds=time.perf_counter() - started,
            cancel=cancel or Event(),
        )

    def _segments(self, prompt: PromptLike, hints: Sequence[Chunk | str]) -> BlendPrompt:
        if isinstance(prompt, BlendPrompt):
            return prompt
        if isinstance(prompt, str):
            return BlendPrompt.from_text(prompt, self.registry, hints)
        return BlendPrompt.from_messages(prompt, self.registry, self.tokenizer, hints)

    def _unmatched(self, prompt: EncodedPrompt, hints: Sequence[Chunk | str]) -> list[ChunkReport]:
        """Report hinted chunks that do not stand in the prompt word for word."""
        present = {span.chunk.text for span in prompt.spans}
        reports = []
        for hint in hints:
            if isinstance(hint, str) or hint.text in present:
                continue
            reason: MissReason = "altered text" if hint.text in self.registry else "unknown"
            key = self._lead_in.key(hint)
            reports.append(
                ChunkReport(key.chunk_id, -1, 0, False, reason, document_id=hint.document_id)
            )
        return reports

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
        """Prefill a step at a time; None when cancelled meanwhile."""
        steps = self._prefill(request)
        while not request.cancel.is_set():
            with self._lock, torch.no_grad():
                try:
                    next(steps)
                except StopIteration as done:
                    return cast(Prefilled, done.value)
        return None

    def _prefill(self, request: _Request) -> Steps:
        """Blend where there is something to reuse; otherwise ordinary prefill, saying why."""
        chunks = PromptChunks(request.prompt, self._lead_in, self.store)
        reserve = min(request.max_tokens, GROWTH_TOKENS)
        refusal, miss = self._refusal(request, chunks)
        if refusal is None and self._stack is not None:
            return (yield from blended_prefill(self._stack, chunks, request.config, reserve))
        prefilled = yield from ordinary_prefill(
            self.model, self._stack, request.prompt.token_ids, reserve
        )
        prefilled.reason = refusal
        prefilled.chunks = [] if request.full else chunks.missed(miss)
        return prefilled

    def _refusal(
        self, request: _Request, chunks: PromptChunks
    ) -> tuple[str | None, MissReason | None]:
        """Why the prompt is not blended, and what to say of its chunks; (None, None) when it is."""
        if request.full:
            return "full prefill was asked for", None
        if not request.prompt.spans:
            return "no known chunk in the prompt", None
        if self._stack is None:
            return f"unsupported model: {self.blend_refusal}", "unsupported model"
        reusable = chunks.stored_tokens()
        if reusable == 0:
            return "no chunk of the prompt is stored", None
        least = request.config.min_tokens
        if reusable < least:
            return f"{reusable} reusable tokens are fewer than min_tokens={least}", "too short"
        return None, None

    def _tokens(self, request: _Request, prefilled: Prefilled) -> Iterator[int]:
        """Draw at most max_tokens tokens, each decoded from the one before it."""
        watch = Stopwatch(self.model.device, prefilled.seconds)
        sampler = Sampler(request.sampling, self.model.device)
        token_ids, logits = list(request.prompt.token_ids), prefilled.logits
        for index in range(request.max_tokens):
            if index:
                with self._lock, torch.no_grad():
                    logits = decode(self.model, prefilled.cache, token_ids)
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
        return Generation(
            text=text.text,
            token_ids=tuple(text.token_ids),
            finish_reason=reason,
            prompt_tokens=tokens,
            report=self._report(request, prefilled),
        )

    def _report(self, request: _Request, prefilled: Prefilled | None) -> BlendReport:
        tokens = len(request.prompt.token_ids)
        done = prefilled or Prefilled.nothing()
        hits = [chunk for chunk in done.chunks if chunk.hit]
        recomputed = sum(chunk.recomputed for chunk in hits)
        reused = sum(chunk.tokens for chunk in hits) - recomputed
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
            seconds=PhaseSeconds(prepare=request.prepare_seconds, **done.seconds),
            chunks=(*done.chunks, *request.unmatched),
        )


def _lock_of(model: PreTrainedModel) -> threading.RLock:
    """The lock of all engines around a model: driving its layers alters it for a moment."""
    with _locks_lock:
        return _locks.setdefault(model, threading.RLock())


def _chunks(item: Item) -> list[Chunk]:
    if isinstance(item, Document):
        return item.to_chunks()
    return [Chunk(item) if isinstance(item, str) else item]


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
