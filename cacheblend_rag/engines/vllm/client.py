"""VLLMClient: an Engine over a vLLM that runs the connector, wherever it runs.

It turns prompts into token ids and orders, and what comes back into answers and reports. Where the
requests go, to an engine in this process or to a server, is a subclass's business.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from abc import abstractmethod
from collections import Counter
from collections.abc import (
    AsyncIterator,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import dataclass, replace
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any, TypeVar, cast

from tqdm import tqdm

from cacheblend_rag.chunks import Chunk, ChunkRegistry
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
from cacheblend_rag.engines.front import EngineFront, Item, PreparedPrompt
from cacheblend_rag.engines.vllm.wire import (
    PARAMETER,
    SALT_PREFIX,
    Kind,
    Order,
    SentChunk,
    SentLeadIn,
)
from cacheblend_rag.errors import CacheBlendError
from cacheblend_rag.fusion.indexing import DocumentPass, document_passes
from cacheblend_rag.fusion.lead_in import LeadIn, LedChunk, PlacedChunk, place_chunks
from cacheblend_rag.kv.chunk_kv import chunk_id
from cacheblend_rag.prompt import Tokenizer
from cacheblend_rag.reports import ChunkReport

T = TypeVar("T")

CANCEL_SECONDS = 0.05
ORDERS_AT_ONCE = 8
PHASES = ("load", "selection", "recompute")


@dataclass(frozen=True)
class Piece:
    """A part of an answer as vLLM sends it; ``params`` comes with the last one."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    params: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class VLLMRequest:
    """What is sent: token ids, sampling, the order if there is one, and the cache salt."""

    token_ids: tuple[int, ...]
    sampling: SamplingParams
    salt: str
    order: Order | None = None


@dataclass(frozen=True)
class _Asked:
    """A request on its way, and why it brings no order."""

    prepared: PreparedPrompt
    placed: tuple[PlacedChunk, ...]
    request: VLLMRequest
    config: BlendConfig
    reason: str | None


class VLLMClient(EngineFront):
    """See the module. Subclasses send requests (``_send``) and know the window."""

    name = "vllm"

    def __init__(
        self,
        model_name: str,
        tokenizer: Any,
        config: BlendConfig | None,
        registry: ChunkRegistry | None,
        instruction: str | Callable[[Tokenizer], str],
    ) -> None:
        super().__init__(tokenizer, config, registry, instruction)
        self.model_name = model_name
        self._lead_in = LeadIn(
            tokenizer, self.config, instruction=self.instruction, identity={}, namespace=""
        )
        document = self._lead_in.name == "document"
        self._sent_lead_in = SentLeadIn(
            self._lead_in.name,
            chunk_id(self._lead_in.tokens),
            self._lead_in.window if document else 0,
        )
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, name="cacheblend-vllm", daemon=True)
        self._thread.start()

    @abstractmethod
    def _send(self, request: VLLMRequest) -> AsyncIterator[Piece]:
        """Answer a request piece by piece; closing the iterator aborts it."""

    # Index time

    def precompute(self, items: Iterable[Item], *, progress: bool = True) -> PrecomputeReport:
        """As TransformersEngine.precompute; the work is done by vLLM's workers."""
        started = time.perf_counter()
        refused: Counter[str] = Counter()
        chunks, stale = self._register_current(items, refused)
        self._drop(stale)
        led = []
        for chunk in chunks:
            resolved = self._lead_in.resolve(chunk)
            if reason := self._refusal(resolved):
                refused[reason] += 1
            else:
                led.append(resolved)
        distinct = list({chunk.key: chunk for chunk in led}.values())
        counts: Counter[str] = Counter(skipped=len(led) - len(distinct))
        with tqdm(total=len(led), desc="precompute", unit="chunk", disable=not progress) as bar:
            bar.update(counts["skipped"])

            async def store(work: DocumentPass) -> None:
                result = await self._carry_out(self._precompute_request(work))
                for name in ("computed", "skipped", "computed_tokens"):
                    counts[name] += int(result.get(name, 0))
                refused.update(result.get("refused", {}))
                if "error" in result:
                    refused[str(result["error"])] += len(work.members)
                bar.update(len(work.members))

            self._run(_all_of([store(work) for work in self._passes(distinct)]))
        return PrecomputeReport(
            computed=counts["computed"],
            skipped=counts["skipped"],
            computed_tokens=counts["computed_tokens"],
            seconds=time.perf_counter() - started,
            refused=dict(refused),
        )

    def prefetch(self, hints: Iterable[Chunk | str]) -> None:
        """Start loading chunks (or all chunks of a document, by id) into the fastest tier."""
        chunks = [
            chunk
            for hint in hints
            for chunk in (self.registry.document(hint) if isinstance(hint, str) else (hint,))
        ]
        if chunks:
            asyncio.run_coroutine_threadsafe(
                self._carry_out(self._keys_request("prefetch", chunks)), self._loop
            )

    def evict_document(self, document_id: str) -> int:
        """Forget a document's chunks and drop their KV; returns how many were dropped."""
        return self._drop(self.registry.remove_document(document_id))

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
        """Answer one prompt; see Engine."""
        return self._run(_last(self._serve(self._ask(prompt, sampling, config, hints), cancel)))

    def generate_full(
        self, prompt: PromptLike, sampling: SamplingParams | None = None
    ) -> Generation:
        """Answer by vLLM's ordinary prefill of the same tokens, not from its prefix cache."""
        asked = self._ask(prompt, sampling, None, ())
        return self._run(_last(self._serve(_plain(asked, "full prefill was asked for"), None)))

    def stream(
        self,
        prompt: PromptLike,
        sampling: SamplingParams | None = None,
        *,
        config: BlendConfig | None = None,
        hints: Sequence[Chunk | str] = (),
        cancel: Event | None = None,
    ) -> Iterator[Delta]:
        """Answer piece by piece; closing the iterator stops the work."""
        stop = cancel or Event()
        asked = self._ask(prompt, sampling, config, hints)
        arrived: SimpleQueue[Delta | BaseException | None] = SimpleQueue()
        self._start(self._serve(asked, stop), arrived.put)

        def deltas() -> Iterator[Delta]:
            try:
                while (item := arrived.get()) is not None:
                    if isinstance(item, BaseException):
                        raise item
                    yield item
            finally:
                stop.set()

        return deltas()

    def generate_batch(
        self,
        prompts: Sequence[PromptLike],
        sampling: SamplingParams | None = None,
        *,
        config: BlendConfig | None = None,
        hints: Sequence[Chunk | str] = (),
    ) -> list[Generation]:
        """Answer several prompts at once; all are checked before the first is sent."""
        asked = [self._ask(prompt, sampling, config, hints) for prompt in prompts]

        async def answer() -> list[Generation]:
            return await asyncio.gather(*(_last(self._serve(a, None)) for a in asked))

        return self._run(answer())

    async def agenerate(
        self,
        prompt: PromptLike,
        sampling: SamplingParams | None = None,
        *,
        config: BlendConfig | None = None,
        hints: Sequence[Chunk | str] = (),
    ) -> Generation:
        """As generate; cancelling the task stops the work."""
        return await _last(self.astream(prompt, sampling, config=config, hints=hints))

    async def astream(
        self,
        prompt: PromptLike,
        sampling: SamplingParams | None = None,
        *,
        config: BlendConfig | None = None,
        hints: Sequence[Chunk | str] = (),
    ) -> AsyncIterator[Delta]:
        """As stream, without a thread in between; leaving the loop over it stops the work."""
        here, stop = asyncio.get_running_loop(), Event()
        arrived: asyncio.Queue[Delta | BaseException | None] = asyncio.Queue()
        asked = await asyncio.to_thread(self._ask, prompt, sampling, config, hints)

        def deliver(item: Delta | BaseException | None) -> None:
            if not here.is_closed():
                here.call_soon_threadsafe(arrived.put_nowait, item)

        self._start(self._serve(asked, stop), deliver)
        try:
            while (item := await arrived.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            stop.set()

    @property
    def is_open(self) -> bool:
        """Whether ``close`` has yet to be called."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Stop the background thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    # Orders

    def _refusal(self, led: LedChunk) -> str:
        """Say why a chunk will not be computed; empty when it will."""
        behind = led.context if self._lead_in.name == "document" else ()
        if not led.token_ids:
            return "empty text"
        if len(led.lead) + len(behind) + len(led.token_ids) >= self.context_window - 1:
            return "longer than the context window"
        return ""

    def _passes(self, chunks: list[LedChunk]) -> list[DocumentPass]:
        if self._lead_in.name == "document":
            return document_passes(chunks)
        alone = [replace(chunk, context=()) for chunk in chunks]
        return [DocumentPass([*c.lead, *c.token_ids], [(c, len(c.lead))]) for c in alone]

    def _precompute_request(self, work: DocumentPass) -> VLLMRequest:
        chunks = tuple(
            SentChunk(start, start + len(led.token_ids), led.key.context_id, False, len(led.lead))
            for led, start in work.members
        )
        order = Order("precompute", self._sent_lead_in, chunks)
        return _carrier((*work.tokens, work.tokens[-1]), order)

    def _keys_request(self, kind: Kind, chunks: Sequence[Chunk]) -> VLLMRequest:
        keys = [self._lead_in.key(chunk) for chunk in chunks]
        named = tuple((key.chunk_id, key.context_id) for key in keys)
        return _carrier((0, 0), Order(kind, self._sent_lead_in, keys=named))

    def _drop(self, chunks: Sequence[Chunk]) -> int:
        dropped = [chunk for chunk in chunks if not self._is_shared(chunk)]
        if not dropped:
            return 0
        result = self._run(self._carry_out(self._keys_request("evict", dropped)))
        return int(result.get("evicted", 0))

    async def _carry_out(self, request: VLLMRequest) -> Mapping[str, Any]:
        """Send a request for the sake of its order; returns the worker's result."""
        params: Mapping[str, Any] = {}
        async for piece in self._send(request):
            params = piece.params or params
        result: Mapping[str, Any] = params.get(PARAMETER) or {"error": "no report came back"}
        return {"error": result["reason"]} if "reason" in result else result

    # Questions

    def _ask(
        self,
        prompt: PromptLike,
        sampling: SamplingParams | None,
        config: BlendConfig | None,
        hints: Sequence[Chunk | str],
    ) -> _Asked:
        config, sampling = config or self.config, sampling or SamplingParams()
        prepared = self._prepare_prompt(prompt, sampling, hints)
        sampling = replace(sampling, max_tokens=prepared.max_tokens)
        tokens = prepared.prompt.token_ids
        spans = [span for span in prepared.prompt.spans if span.end < len(tokens)]
        placed = tuple(place_chunks(spans, self._lead_in))
        known = sum(chunk.end - chunk.start for chunk in placed)
        asked = _Asked(prepared, placed, VLLMRequest(tokens, sampling, _fresh_salt()), config, None)
        if not placed:
            return _plain(asked, "no known chunk in the prompt")
        if known < config.min_tokens:
            return _plain(
                asked, f"{known} chunk tokens are fewer than min_tokens={config.min_tokens}"
            )
        order = Order(
            "blend",
            self._sent_lead_in,
            tuple(SentChunk(c.start, c.end, c.key.context_id, c.protected) for c in placed),
            config=config,
        )
        return replace(asked, request=VLLMRequest(tokens, sampling, order.salt(), order))

    async def _serve(self, asked: _Asked, cancel: Event | None) -> AsyncIterator[Delta]:
        started = time.perf_counter()
        first = 0.0
        text, last = "", Piece("", ())
        ids: list[int] = []
        async with aclosing(cast(Any, self._send(asked.request))) as pieces:
            async for piece in _until(pieces, cancel):
                first = first or time.perf_counter() - started
                text, last = text + piece.text, piece
                ids += piece.token_ids
                if piece.text and piece.finish_reason is None:
                    yield Delta(piece.text)
        seconds = (first, time.perf_counter() - started - first)
        reason = cast(FinishReason, last.finish_reason or "cancelled")
        if asked.request.sampling.ignore_eos is False and reason == "stop":
            ids = _without_end(ids, self.tokenizer)
        generation = Generation(
            text=text,
            token_ids=tuple(ids),
            finish_reason=reason,
            prompt_tokens=len(asked.request.token_ids),
            report=self._report(asked, last.params or {}, seconds),
        )
        yield Delta(last.text if last.finish_reason else "", generation)

    def _report(
        self, asked: _Asked, params: Mapping[str, Any], seconds: tuple[float, float]
    ) -> BlendReport:
        result = params.get(PARAMETER) or {}
        chunks = [ChunkReport(**chunk) for chunk in result.get("chunks", ())]
        named = zip(chunks, asked.placed, strict=False)
        chunks = [replace(chunk, document_id=placed.document_id) for chunk, placed in named]
        hits = [chunk for chunk in chunks if chunk.hit]
        recomputed = sum(chunk.recomputed for chunk in hits)
        reused = sum(chunk.tokens for chunk in hits) - recomputed
        tokens = len(asked.request.token_ids)
        phases = {name: float(result.get("seconds", {}).get(name, 0.0)) for name in PHASES}
        rest = max(0.0, seconds[0] - sum(phases.values()))
        return BlendReport(
            engine=self.name,
            blended=bool(hits),
            reason=None if hits else _reason(asked, result),
            prompt_tokens=tokens,
            reused_tokens=reused,
            recomputed_tokens=recomputed,
            computed_tokens=tokens - reused - recomputed,
            recompute_ratio=float(result.get("ratio", 1.0)),
            selector=str(result.get("selector", "none")),
            lead_in=self._lead_in.name,
            compute_share=float(result.get("compute_share", 1.0)),
            seconds=PhaseSeconds(
                prepare=asked.prepared.prepare_seconds,
                first_token=rest,
                decode=seconds[1],
                **phases,
            ),
            chunks=(*chunks, *asked.prepared.unmatched),
        )

    # The background loop

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        future: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        return future.result()

    def _start(
        self,
        deltas: AsyncIterator[Delta],
        deliver: Callable[[Delta | BaseException | None], None],
    ) -> None:
        """Run a stream in the background, delivering its items, then None or its error."""

        async def work() -> None:
            try:
                async for delta in deltas:
                    deliver(delta)
                deliver(None)
            except BaseException as error:
                deliver(error)

        asyncio.run_coroutine_threadsafe(work(), self._loop)


def _plain(asked: _Asked, reason: str) -> _Asked:
    request = VLLMRequest(asked.request.token_ids, asked.request.sampling, _fresh_salt())
    return replace(asked, request=request, reason=reason)


def _fresh_salt() -> str:
    """Return a salt that nothing else has: ordinary prefill, not vLLM's prefix cache, is asked."""
    return f"plain-{uuid.uuid4().hex}"


def _carrier(token_ids: tuple[int, ...], order: Order) -> VLLMRequest:
    sampling = SamplingParams(max_tokens=2, ignore_eos=True)
    return VLLMRequest(token_ids, sampling, f"{SALT_PREFIX}{uuid.uuid4().hex}", order)


def _reason(asked: _Asked, result: Mapping[str, Any]) -> str:
    if asked.reason:
        return asked.reason
    if "chunks" in result:
        return "no chunk of the prompt is stored"
    return str(result.get("error") or result.get("reason") or "no report came back")


def _without_end(ids: list[int], tokenizer: Any) -> list[int]:
    return ids[:-1] if ids and ids[-1] == tokenizer.eos_token_id else ids


async def _all_of(work: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Await all, a few at a time, so that a large index does not flood the scheduler."""
    gate = asyncio.Semaphore(ORDERS_AT_ONCE)

    async def gated(one: Coroutine[Any, Any, None]) -> None:
        async with gate:
            await one

    await asyncio.gather(*map(gated, work))


async def _last(deltas: AsyncIterator[Delta]) -> Generation:
    generation: Generation | None = None
    async for delta in deltas:
        generation = delta.generation
    if generation is None:
        raise CacheBlendError("vLLM ended a request without an answer")
    return generation


async def _until(pieces: AsyncIterator[Piece], cancel: Event | None) -> AsyncIterator[Piece]:
    """Pass pieces on until ``cancel`` is set, which is looked at now and then."""
    while True:
        step = asyncio.ensure_future(anext(pieces))
        while not step.done():
            await asyncio.wait({step}, timeout=None if cancel is None else CANCEL_SECONDS)
            if cancel is not None and cancel.is_set():
                step.cancel()
                await asyncio.wait({step})
                return
        try:
            yield step.result()
        except StopAsyncIteration:
            return
