"""VLLMClient: an Engine over a vLLM that runs the connector, wherever it runs.

It turns prompts into token ids and orders, and what comes back into answers and reports. Where the
requests go, to an engine in this process or to a server, is a subclass's business.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from abc import abstractmethod
from collections import Counter
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing
from dataclasses import dataclass, replace
from queue import SimpleQueue
from threading import Event
from typing import Any, TypeVar, cast

from tqdm import tqdm

from cacheblend_rag.config import BlendConfig, LeadInConfig
from cacheblend_rag.engines.base import (
    FULL_PREFILL,
    Delta,
    FinishReason,
    Generation,
    PromptLike,
    SamplingParams,
)
from cacheblend_rag.engines.front import (
    FORGOTTEN,
    EngineFront,
    Item,
    PreparedPrompt,
    checked,
)
from cacheblend_rag.engines.vllm.background import BackgroundLoop
from cacheblend_rag.engines.vllm.protocol import (
    BlendJob,
    BlendResult,
    ConnectorStatus,
    Declined,
    EvictResult,
    Failed,
    Late,
    PrecomputeResult,
    Result,
    SentChunk,
    SentLeadIn,
    params_of,
    result_of,
    status_of,
)
from cacheblend_rag.engines.vllm.protocol.job import MOST_KEYS, SALT_PREFIX, Kind
from cacheblend_rag.engines.vllm.protocol.result import NO_REPORT
from cacheblend_rag.engines.vllm.protocol.status import NO_CONNECTOR
from cacheblend_rag.errors import CacheBlendError, ConfigError, EngineUnavailableError
from cacheblend_rag.kv.chunk_kv import chunk_id, namespace_id
from cacheblend_rag.prefill.lead_in import ChunkPlan, LeadIn, PlacedChunk, place_chunks
from cacheblend_rag.prefill.policy import NOT_STORED, too_little
from cacheblend_rag.prefill.precompute import DocumentPlan, document_plans
from cacheblend_rag.report import (
    BlendReport,
    ChunkReport,
    PhaseSeconds,
    PrecomputeReport,
    reused_and_recomputed,
)
from cacheblend_rag.text.chunk import Chunk
from cacheblend_rag.text.encoder import Tokenizer
from cacheblend_rag.text.registry import ChunkRegistry

logger = logging.getLogger(__name__)

T = TypeVar("T")

CANCEL_SECONDS = 0.05
ORDERS_AT_ONCE = 8
PHASES = ("load", "selection", "recompute")
LATE: Mapping[str, Any] = params_of(Late())
"""Stands for a result that did not come with its answer and is to be asked for."""


@dataclass(frozen=True)
class Piece:
    """A part of an answer as vLLM sends it.

    The last one says why the answer ended: finish_reason, and ended_by: the string or the token
    that ended it, None for the end-of-sequence token. It brings params: the connector's result.
    decode_seconds: time after the first token, where vLLM tells it.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    ended_by: int | str | None = None
    params: Mapping[str, Any] | None = None
    decode_seconds: float | None = None


@dataclass(frozen=True)
class VLLMRequest:
    """What is sent: token ids, sampling, the order if there is one, and the cache salt.

    salt: requests with the same one, or none, share vLLM's prefix cache. replica: which of several
    engines behind one address is to serve it; None is any.
    """

    token_ids: tuple[int, ...]
    sampling: SamplingParams
    salt: str | None = None
    order: BlendJob | None = None
    replica: int | None = None


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
        *,
        config: BlendConfig | None,
        registry: ChunkRegistry | None,
        instruction: str | Callable[[Tokenizer], str],
        namespace: str,
        lead_in: LeadInConfig | str | None,
        background: BackgroundLoop,
    ) -> None:
        """Ask whom it talks to; requests must be possible already.

        Raises ConfigError when KV of another namespace is kept there.
        """
        super().__init__(tokenizer, config, registry, instruction, lead_in)
        self.model_name, self.namespace = model_name, namespace
        self._background = background
        self.status = self._ask_status()
        if self.status.namespace not in {"", namespace_id(namespace)}:
            raise ConfigError(
                f"namespace={namespace!r} is not the server's: give the one it was started with "
                "(cacheblend-rag serve --namespace)"
            )
        self._lead_in = LeadIn(
            self.encoder,
            self.lead_in,
            instruction=self.instruction,
            identity={"vllm": self.status.identity or model_name},
            namespace=namespace,
        )
        document = self._lead_in.name == "document"
        self._sent_lead_in = SentLeadIn(
            self._lead_in.name,
            chunk_id(self._lead_in.tokens),
            self._lead_in.window if document else 0,
        )

    @abstractmethod
    def _send(self, request: VLLMRequest, *, stream: bool) -> AsyncIterator[Piece]:
        """Answer a request, piece by piece if ``stream``; closing the iterator aborts it."""

    # Index time

    def precompute(self, items: Iterable[Item], *, progress: bool = True) -> PrecomputeReport:
        """As TransformersEngine.precompute; the work is done by vLLM's workers."""
        started = time.perf_counter()
        refused: Counter[str] = Counter()
        chunks, replaced = self._register_current(items, refused)
        led = []
        for chunk in chunks:
            resolved = self._lead_in.resolve(chunk)
            if reason := self._refusal(resolved):
                refused[reason] += 1
            else:
                led.append(resolved)
        distinct = list({chunk.key: chunk for chunk in led}.values())
        counts: Counter[str] = Counter(skipped=len(led) - len(distinct))
        if distinct and not self._is_active():
            refused[self.status.refusal] += len(led)
            led, distinct, counts = [], [], Counter()
        with tqdm(total=len(led), desc="precompute", unit="chunk", disable=not progress) as bar:
            bar.update(counts["skipped"])

            async def store(work: DocumentPlan) -> None:
                request = self._precompute_request(work)
                # Replicas that share a folder find there what one of them computes.
                result = await self._carry_out(request, everywhere=not self.status.shared)
                if isinstance(result, PrecomputeResult):
                    for name in ("computed", "skipped", "computed_tokens"):
                        counts[name] += getattr(result, name)
                    refused.update(result.refused)
                elif isinstance(result, Failed):
                    refused[result.error] += len(work.members)
                bar.update(len(work.members))

            self._run(_all_of([store(work) for work in self._passes(distinct)], ORDERS_AT_ONCE))
        refused[FORGOTTEN] += self._drop_forgotten(chunks)
        return PrecomputeReport(
            computed=counts["computed"],
            skipped=counts["skipped"],
            computed_tokens=counts["computed_tokens"],
            seconds=time.perf_counter() - started,
            refused=dict(+refused),
            replaced=replaced,
        )

    def prefetch(self, hints: Iterable[Chunk | str]) -> None:
        """Start loading chunks (or all chunks of a document, by id) into the fastest tier."""
        chunks = self._hinted(hints)

        async def load() -> None:
            try:
                for request in self._keys_requests("prefetch", chunks):
                    await self._carry_out(request, everywhere=True)
            except CacheBlendError as error:
                logger.warning("chunks were not prefetched: %s", error)

        if chunks:
            self._background.start(load())

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
        asked = self._ask(prompt, sampling, config, hints)
        return self._run(_last(self._serve(asked, cancel, stream=False)))

    def generate_full(
        self,
        prompt: PromptLike,
        sampling: SamplingParams | None = None,
        *,
        hints: Sequence[Chunk | str] = (),
        salt: str | None = None,
    ) -> Generation:
        """Answer by vLLM's ordinary prefill of the same tokens, not from its prefix cache.

        hints: as given to generate, since they decide where a prompt is cut, hence its tokens.
        salt: prompts with the same one share vLLM's prefix cache.
        """
        asked = self._ask(prompt, sampling, None, hints)
        plain = _plain(asked, FULL_PREFILL, salt or _fresh_salt())
        return self._run(_last(self._serve(plain, None, stream=False)))

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
        self._background.deliver(self._serve(asked, stop, stream=True), arrived.put)

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

        return self._run(_all_of([_last(self._serve(one, None, stream=False)) for one in asked]))

    async def agenerate(
        self,
        prompt: PromptLike,
        sampling: SamplingParams | None = None,
        *,
        config: BlendConfig | None = None,
        hints: Sequence[Chunk | str] = (),
    ) -> Generation:
        """As generate; cancelling the task stops the work."""
        asked = await asyncio.to_thread(self._ask, prompt, sampling, config, hints)
        async with aclosing(self._from_background(asked, stream=False)) as deltas:
            return await _last(deltas)

    async def astream(
        self,
        prompt: PromptLike,
        sampling: SamplingParams | None = None,
        *,
        config: BlendConfig | None = None,
        hints: Sequence[Chunk | str] = (),
    ) -> AsyncIterator[Delta]:
        """As stream, without a thread in between; leaving the loop over it stops the work."""
        asked = await asyncio.to_thread(self._ask, prompt, sampling, config, hints)
        async with aclosing(self._from_background(asked, stream=True)) as deltas:
            async for delta in deltas:
                yield delta

    async def _from_background(self, asked: _Asked, *, stream: bool) -> AsyncGenerator[Delta]:
        here, stop = asyncio.get_running_loop(), Event()
        arrived: asyncio.Queue[Delta | BaseException | None] = asyncio.Queue()

        def take(item: Delta | BaseException | None) -> None:
            if not here.is_closed():
                here.call_soon_threadsafe(arrived.put_nowait, item)

        self._background.deliver(self._serve(asked, stop, stream=stream), take)
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
        return self._background.is_open

    def close(self) -> None:
        """Give up what is at work and free what the engine holds."""
        self._background.close()

    # Orders

    def _refusal(self, led: ChunkPlan) -> str:
        """Say why a chunk will not be computed; empty when it will."""
        behind = led.context if self._lead_in.name == "document" else ()
        if not led.token_ids:
            return "empty text"
        if not self._fits(led, behind):
            return "longer than the context window"
        return ""

    def _passes(self, chunks: list[ChunkPlan]) -> list[DocumentPlan]:
        """Group chunks into runs; where a document does not fit, its chunks have no prior."""
        return document_plans(
            chunk if self._fits(chunk, chunk.context) else replace(chunk, context=())
            for chunk in chunks
        )

    def _fits(self, chunk: ChunkPlan, behind: tuple[int, ...]) -> bool:
        return len(chunk.lead) + len(behind) + len(chunk.token_ids) < self.context_window - 1

    def _precompute_request(self, work: DocumentPlan) -> VLLMRequest:
        chunks = tuple(
            SentChunk(start, start + len(led.token_ids), led.key.context_id, False, len(led.lead))
            for led, start in work.members
        )
        return _carrier(
            BlendJob("precompute", self._sent_lead_in, chunks, tokens=tuple(work.tokens))
        )

    def _keys_requests(self, kind: Kind, chunks: Sequence[Chunk]) -> Iterator[VLLMRequest]:
        keys = [self._lead_in.key(chunk) for chunk in chunks]
        named = [(key.chunk_id, key.context_id) for key in keys]
        for start in range(0, len(named), MOST_KEYS):
            some = tuple(named[start : start + MOST_KEYS])
            yield _carrier(BlendJob(kind, self._sent_lead_in, keys=some))

    def _evict(self, chunks: Sequence[Chunk]) -> int:
        evicted = 0
        for request in self._keys_requests("evict", chunks):
            result = self._run(self._carry_out(request, everywhere=True))
            evicted += _done(result)
        return evicted

    async def _carry_out(self, request: VLLMRequest, *, everywhere: bool) -> Result:
        """Send a request for the sake of its order; returns the connector's result.

        everywhere: to each replica, of which the one that did most, or failed, is heard.
        """
        asked = self._to_replicas(request) if everywhere else [request]
        results = [_outcome(params) for params in await _all_of(map(self._params, asked))]
        failed = [result for result in results if isinstance(result, Failed)]
        return failed[0] if failed else max(results, key=_done)

    def _to_replicas(self, request: VLLMRequest) -> list[VLLMRequest]:
        """Return the request for each engine that is behind the address."""
        if self.status.replicas == 1:
            return [request]
        return [replace(request, replica=index) for index in range(self.status.replicas)]

    async def _params(self, request: VLLMRequest) -> Mapping[str, Any] | None:
        params: Mapping[str, Any] | None = None
        async for piece in self._send(request, stream=False):
            params = piece.params or params
        return params

    async def _late_result(self, report_id: str) -> Mapping[str, Any] | None:
        """Ask for the result of a finished request, of each replica: one of them served it."""
        order = BlendJob("report", self._sent_lead_in, report_id=report_id)
        asked = self._to_replicas(_carrier(order))
        answers = await _all_of(map(self._params, asked))
        told = [answer for answer in answers if result_of(answer) != NO_REPORT]
        return (told or answers)[0]

    def _ask_status(self) -> ConnectorStatus:
        return status_of(self._run(self._params(status_request())))

    def _is_active(self) -> bool:
        """Whether orders are carried out; asked again when they were not the last time."""
        if not self.status.active:
            self.status = self._ask_status()
        return self.status.active

    # Questions

    def _ask(
        self,
        prompt: PromptLike,
        sampling: SamplingParams | None,
        config: BlendConfig | None,
        hints: Sequence[Chunk | str],
    ) -> _Asked:
        config, sampling = checked(config or self.config), sampling or SamplingParams()
        prepared = self._prepare_prompt(prompt, sampling, hints)
        sampling = replace(sampling, max_tokens=prepared.max_tokens)
        tokens = prepared.prompt.token_ids
        spans = [span for span in prepared.prompt.spans if span.end < len(tokens)]
        placed = tuple(place_chunks(spans, self._lead_in))
        known = sum(chunk.end - chunk.start for chunk in placed)
        asked = _Asked(prepared, placed, VLLMRequest(tokens, sampling), config, None)
        if not placed:
            return _plain(asked, "no known chunk in the prompt")
        if refused := too_little(known, config.min_tokens):
            return _plain(asked, refused[0])
        order = BlendJob(
            "blend",
            self._sent_lead_in,
            tuple(SentChunk(c.start, c.end, c.key.context_id, c.protected) for c in placed),
            config=config,
            report_id=uuid.uuid4().hex,
        )
        return replace(asked, request=VLLMRequest(tokens, sampling, order.salt(tokens), order))

    async def _serve(
        self, asked: _Asked, cancel: Event | None, *, stream: bool
    ) -> AsyncIterator[Delta]:
        started = time.perf_counter()
        first = ended = 0.0
        text, last = "", Piece("", (), "abort")
        ids: list[int] = []
        pieces = self._send(asked.request, stream=stream)
        async with aclosing(cast(AsyncGenerator[Piece], pieces)):
            async for piece in _until(pieces, cancel):
                ended = time.perf_counter() - started
                first = first or ended
                text, last = text + piece.text, piece
                ids += piece.token_ids
                if piece.text:
                    yield Delta(piece.text)
        reason = _finish_reason(last.finish_reason)
        stopped_by_text = isinstance(last.ended_by, str)
        if reason == "stop" and not stopped_by_text:
            ids = ids[:-1]
        params, order = last.params, asked.request.order
        # vLLM looks for stop strings outside its engine core, where the connector is not heard.
        if order is not None and (stopped_by_text or isinstance(result_of(params), Late)):
            params = await self._late_result(order.report_id)
        if last.decode_seconds is not None:
            first = ended - last.decode_seconds
        generation = Generation(
            text=text,
            token_ids=tuple(ids),
            finish_reason=reason,
            prompt_tokens=len(asked.request.token_ids),
            report=self._report(asked, reason, result_of(params), (first, ended - first)),
        )
        yield Delta("", self._told(asked.prepared, generation))

    def _report(
        self,
        asked: _Asked,
        finish_reason: FinishReason,
        result: Result | None,
        seconds: tuple[float, float],
    ) -> BlendReport:
        done = result if isinstance(result, BlendResult) else BlendResult(_missed(result))
        named = zip(done.chunks, asked.placed, strict=False)
        chunks = [replace(chunk, document_id=placed.document_id) for chunk, placed in named]
        blended = any(chunk.hit for chunk in chunks)
        reused, recomputed = reused_and_recomputed(chunks)
        tokens = len(asked.request.token_ids)
        phases = {name: done.seconds.get(name, 0.0) for name in PHASES}
        rest = max(0.0, seconds[0] - sum(phases.values()))
        return BlendReport(
            engine=self.name,
            blended=blended,
            reason=None if blended else _reason(asked, finish_reason, result),
            prompt_tokens=tokens,
            reused_tokens=reused,
            recomputed_tokens=recomputed,
            computed_tokens=tokens - reused - recomputed,
            recompute_ratio=done.ratio,
            selector=done.selector,
            lead_in=self._lead_in.name,
            compute_share=done.compute_share,
            seconds=PhaseSeconds(
                prepare=asked.prepared.prepare_seconds,
                first_token=rest,
                decode=seconds[1],
                **phases,
            ),
            chunks=(*chunks, *asked.prepared.unmatched),
            selector_reason=done.selector_reason,
        )

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._background.run(work)


def _plain(asked: _Asked, reason: str, salt: str | None = None) -> _Asked:
    request = VLLMRequest(asked.request.token_ids, asked.request.sampling, salt)
    return replace(asked, request=request, reason=reason)


def _fresh_salt() -> str:
    """Return a salt that nothing else has: ordinary prefill, not vLLM's prefix cache, is asked."""
    return f"plain-{uuid.uuid4().hex}"


def status_request() -> VLLMRequest:
    """Return the request that asks a connector for its status."""
    return _carrier(BlendJob("status", SentLeadIn("none", "", 0)))


def _carrier(order: BlendJob) -> VLLMRequest:
    sampling = SamplingParams(max_tokens=2, ignore_eos=True)
    return VLLMRequest((0, 0), sampling, f"{SALT_PREFIX}{uuid.uuid4().hex}", order)


def _outcome(params: Mapping[str, Any] | None) -> Result:
    """Return what the connector says of an order that it was sent; Failed where it did nothing."""
    result = result_of(params)
    if result is None:
        return Failed(NO_CONNECTOR)
    return Failed(result.reason) if isinstance(result, Declined) else result


def _done(result: Result) -> int:
    """How much an order has changed in a replica's store."""
    if isinstance(result, PrecomputeResult):
        return result.computed
    return result.evicted if isinstance(result, EvictResult) else 0


def _missed(result: Result | None) -> tuple[ChunkReport, ...]:
    """Return the chunks of a prompt that was not blended, as far as they are told."""
    return (result.chunks or ()) if isinstance(result, Declined) else ()


def _reason(asked: _Asked, finish_reason: FinishReason, result: Result | None) -> str:
    """Say why nothing was reused."""
    if asked.reason:
        return asked.reason
    match result:
        case Failed(error=told) | Declined(reason=told) if told:
            return told
        case BlendResult():
            return NOT_STORED
    return "cancelled before it was told" if finish_reason == "cancelled" else NO_CONNECTOR


def _finish_reason(told: str | None) -> FinishReason:
    if told == "error":
        raise EngineUnavailableError("vLLM ended the request with an error; see its log")
    return cast(FinishReason, {"abort": "cancelled", "length": "length"}.get(told or "", "stop"))


async def _all_of(work: Iterable[Coroutine[Any, Any, T]], at_once: int | None = None) -> list[T]:
    """Await all, ``at_once`` at a time; when one fails, the others are given up."""
    work = list(work)
    gate = asyncio.Semaphore(at_once or len(work) or 1)

    async def gated(one: Coroutine[Any, Any, T]) -> T:
        async with gate:
            return await one

    tasks = [asyncio.ensure_future(gated(one)) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


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
        try:
            while not step.done():
                await asyncio.wait({step}, timeout=None if cancel is None else CANCEL_SECONDS)
                if cancel is not None and cancel.is_set():
                    return
        finally:
            if not step.done():
                step.cancel()
                await asyncio.wait({step})
        try:
            yield step.result()
        except StopAsyncIteration:
            return
