"""The vLLM engine: CacheBlend on a vLLM with the connector, in process or behind a server.

A server of the embedded engine takes the same requests, so this is its client, too.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Generator,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing
from dataclasses import replace
from itertools import islice
from typing import Any, TypeVar, cast
from weakref import proxy

from cacheblend_rag.engines.answer import (
    CANCELLED,
    Delta,
    FinishReason,
    Request,
    TokenLogprob,
    with_texts,
)
from cacheblend_rag.engines.backend import EngineSetup, engine_settings
from cacheblend_rag.engines.base import Engine
from cacheblend_rag.engines.sampling import ResolvedSampling, warn_of_ignored
from cacheblend_rag.engines.stream import Cancellation, Stream
from cacheblend_rag.engines.vllm.protocol.job import (
    MOST_KEYS,
    NOTHING_FOUND,
    Ask,
    Compare,
    Job,
    Precompute,
    Span,
    StoreJob,
    StoreKind,
    Wish,
)
from cacheblend_rag.engines.vllm.protocol.result import (
    CompareResult,
    EvictResult,
    Failed,
    Late,
    LookupResult,
    PrecomputeResult,
    ReleaseResult,
    Result,
    VerifyResult,
    result_of,
)
from cacheblend_rag.engines.vllm.reporting import Times, prefill_report
from cacheblend_rag.engines.vllm.same_passages import SamePassages
from cacheblend_rag.engines.vllm.transport import (
    CANCEL_SECONDS,
    Piece,
    Transport,
    VLLMRequest,
    next_piece,
    until_over,
)
from cacheblend_rag.errors import CacheBlendError, ConfigError, EngineUnavailableError, StoreError
from cacheblend_rag.kv.chunk_kv import KVKey, namespace_id
from cacheblend_rag.kv.stored_chunk import READ_ONLY
from cacheblend_rag.prefill.comparing import Compared, Comparison
from cacheblend_rag.prefill.lead_in import ChunkPlan
from cacheblend_rag.prefill.precompute import DocumentPlan, document_plans
from cacheblend_rag.reason import Reason
from cacheblend_rag.report import Evicted, PrecomputeReport
from cacheblend_rag.settings import BlendConfig, GuardConfig, LeadInConfig, Profile
from cacheblend_rag.text.encoder import Tokenizer
from cacheblend_rag.text.registry import ChunkRegistry

logger = logging.getLogger(__name__)

ToldT = TypeVar("ToldT", bound=Result)

DEFAULT_NAMESPACE = "default"
EMBEDDED_SERVER = "transformers-server"
"""The name of an engine whose server runs the embedded engine."""
JOBS_AT_ONCE = 8


class VLLMEngine(Engine):
    """An engine over a transport.

    Attributes:
        transport: the way to vLLM. status: the connector's latest status. A vLLM without the
            connector answers by ordinary prefill, and every report says so.
    """

    part_chunks = 512
    fills_last = keeps_turns = True

    def __init__(
        self,
        transport: Transport,
        *,
        tokenizer: Any = None,
        config: BlendConfig | None = None,
        registry: ChunkRegistry | None = None,
        instruction: str | Callable[[Tokenizer], str] = "",
        namespace: str = "default",
        lead_in: LeadInConfig | str | None = None,
        fill_on_miss: bool = False,
        guard: GuardConfig | None = None,
    ) -> None:
        """Ask vLLM for its status; the transport closes with the engine, also on failure.

        Args:
            transport: InProcessVLLM or VLLMServer.
            tokenizer: the model's own by default.
            config: the default for requests without one; what it does not set is the server's
                profile's, as for the lead-in.
            registry: known chunks; several engines may share one.
            instruction: the text of prompts before their first chunk.
            namespace: the one that vLLM was started with.
            lead_in: the text that chunks are computed after, as settings or by its kind's name.
            fill_on_miss: whether registered chunks whose KV a request missed, and passages that
                began several prompts, are computed while vLLM does nothing else.
            guard: how the quality of blended answers is watched; None is as the server was started
                (``guard``), by default not at all.

        Raises:
            ConfigError: when a setting is wrong, or namespace or vocabulary are not vLLM's.
            ModelLoadError: when there is no tokenizer.
            EngineUnavailableError: when vLLM does not answer.
        """
        self.transport, self.name = transport, transport.name
        try:
            config, lead_in = engine_settings(config, lead_in)
            tokenizer = tokenizer or transport.load_tokenizer()
            transport.check_tokenizer(tokenizer)
            self._ask_status()
            if self.status.active and not self.status.vllm:
                self.name = EMBEDDED_SERVER
            if self.status.namespace not in {"", namespace_id(namespace)}:
                raise ConfigError(
                    f"namespace={namespace!r} is not the server's: give the one it was started "
                    "with (serve --set namespace=NAME), or that of the key (--tenants)"
                )
            if self.status.profile:
                profile = Profile.of(json.loads(self.status.profile))
                config, lead_in = profile.blended(config), profile.led_in(lead_in)
            self._own_sampling = self._find_sampling()
            super().__init__(
                EngineSetup(
                    model_name=transport.model_name,
                    tokenizer=tokenizer,
                    identity={"vllm": self.status.identity or transport.model_name},
                    config=config,
                    lead_in=lead_in,
                    registry=registry,
                    instruction=instruction,
                    namespace=namespace,
                    fill_on_miss=fill_on_miss,
                    guard=guard or self._guard_of_server(),
                )
            )
        except BaseException:
            transport.close()
            raise
        self._hooks.add(SamePassages(proxy(self), self._idle).see)

    def _guard_of_server(self) -> GuardConfig | None:
        share = self.status.guard
        return GuardConfig(sample_share=share) if 0 < share <= 1 else None

    def _ask_status(self) -> None:
        self.status = self.transport.ask_status()

    # Facts

    @property
    def address(self) -> str:
        """The argument of ``open_engine`` for such an engine: ``vllm``, or the server's URL."""
        return self.transport.address

    @property
    def context_window(self) -> int:
        """Most tokens a prompt and its answer may hold together."""
        return self.transport.context_window

    @property
    def blend_refusal(self) -> Reason | None:
        """Why vLLM blends nothing, by its latest status, or None."""
        return self.status.problem

    @property
    def model_sampling(self) -> ResolvedSampling:
        """The model's own settings, overridden by vLLM's options."""
        return self._own_sampling

    def _find_sampling(self) -> ResolvedSampling:
        """Return the model's settings from the connector, or else from its generation_config."""
        if self.status.sampling is not None:
            return self.status.sampling
        values = self.transport.generation_values()
        warn_of_ignored(values)
        return ResolvedSampling.of_model(values)

    @property
    def read_only(self) -> bool:
        """Whether vLLM's store is read-only, by its latest status."""
        return self.status.read_only

    @property
    def _token_bytes(self) -> int:
        return self.status.token_bytes

    @property
    def _longest_run(self) -> int:
        return self.context_window - 2  # a job's request decodes one token after its prompt

    async def carry_out(self, job: Job) -> Result:
        """Have the connector do a job, on each replica that must; cancelling it stops the work."""
        return await self.transport.carry_out(job)

    # A request: a wish for the connector, then vLLM's answer

    def _check_sampling(self, sampling: ResolvedSampling) -> None:
        """Leave checks to vLLM, which makes them before it begins to work.

        Raises ConfigError for log-probabilities of the prompt.
        """
        if sampling.prompt_logprobs is not None:
            raise ConfigError(
                "prompt_logprobs: the embedded engine has them; of vLLM's own server ask for echo"
            )

    def _start(self, request: Request) -> Stream[Delta]:
        answer = self._answer(request, self._sent(request))
        return self.transport.background.stream(answer, request.cancel)

    def _sent(self, request: Request) -> VLLMRequest:
        """Return the request for vLLM, which finds what there is to reuse."""
        is_plain = request.full or request.steering.refusal is not None
        return VLLMRequest(
            request.prepared.token_ids,
            request.sampling,
            self._salt(request),
            NOTHING_FOUND if is_plain else self._wish(request),
            request_id=request.request_id,
            headers=request.headers,
        )

    def _wish(self, request: Request) -> Wish:
        return Wish(
            config=request.config.to_dict(), report_id=uuid.uuid4().hex, **self._of_turns(request)
        )

    def _of_turns(self, request: Request) -> dict[str, Any]:
        """Return the fields of a wish or a comparison that name a request's conversation."""
        prompt = request.prepared
        if not prompt.conversation_key:
            return {}
        return {"conversation": prompt.conversation_key, "until": prompt.question_start}

    def _salt(self, request: Request) -> str | None:
        """Return a request's ``cache_salt``: requests with the same one may share vLLM's blocks.

        Namespaces share none; the default one has no salt, like other clients' requests.
        """
        tenant = "" if self.namespace == DEFAULT_NAMESPACE else namespace_id(self.namespace)
        own = request.cache_salt if request.full else request.prepared.cache_salt or ""
        if own is None or not (request.full or request.config.reuse_prefix):
            own = uuid.uuid4().hex  # one that nothing else has
        return "-".join(part for part in (tenant, own) if part) or None

    async def _answer(self, request: Request, sent: VLLMRequest) -> AsyncIterator[Delta]:
        """Yield text as it comes."""
        if request.cancel.is_set():
            yield self._answered(request, "", (), "cancelled", CANCELLED)
            return
        started = time.perf_counter()
        first = ended = 0.0
        text, last = "", Piece("", (), "abort")
        ids: list[int] = []
        told: list[TokenLogprob] = []
        told_ids = 0
        pieces = self.transport.send(sent, stream=request.streamed)
        async with aclosing(cast("AsyncGenerator[Piece]", pieces)):
            while piece := await next_piece(pieces, request.cancel):
                ended = time.perf_counter() - started
                first = first or ended
                text, last = text + piece.text, piece
                ids += piece.token_ids
                new = with_texts(piece.logprobs, self.tokenizer)
                if _ends_with_its_end(piece):
                    ids, new = ids[:-1], new[:-1]
                told += new
                if piece.text or new:
                    yield Delta(piece.text, logprobs=new, token_ids=tuple(ids[told_ids:]))
                    told_ids = len(ids)
        reason = _finish_reason(last.finish_reason, request)
        result = await self._result(sent, last)
        if last.decode_seconds is not None:
            first = ended - last.decode_seconds
        prefill = prefill_report(
            request,
            result,
            Times(started, first, ended - first),
            cancelled=reason == "cancelled",
            refusal=self.blend_refusal,
        )
        asked = request.sampling.logprobs is not None
        yield self._answered(
            request, text, ids, reason, prefill, logprobs=tuple(told) if asked else None
        )

    async def _result(self, sent: VLLMRequest, last: Piece) -> Result | None:
        """Return the connector's result, which may have to be fetched.

        vLLM searches for stop strings outside its engine core, without calling the connector.
        """
        result = result_of(last.params)
        ended = last.ended_by
        if sent.wish.report_id and ((isinstance(ended, str) and ended) or isinstance(result, Late)):
            asked = Ask(kind="report", report_id=sent.wish.report_id)
            return await self.transport.carry_out(asked)
        return result

    def _compare(
        self, request: Request, compared: Compared
    ) -> Generator[None, None, Comparison | None]:
        """The work is done by a worker, while vLLM does nothing else."""
        job = Compare(
            tokens=tuple(compared.prompt),
            answer=tuple(compared.answer),
            reference=tuple(compared.reference or ()),
            config=request.config,
            **self._of_turns(request),
        )
        cancel = Cancellation(is_over=lambda: not self.is_open)
        asked = until_over(self.transport.carry_out(job), cancel)
        found: Comparison | None = None
        for result in self.transport.background.stream(asked, cancel):
            if isinstance(result, CompareResult):
                found = Comparison(result.divergence, result.prefill_divergence)
            yield
        return found

    # The store's operations

    def _storing_refusal(self) -> Reason | None:
        """Asked again when vLLM did not blend the last time."""
        if not self.status.active:
            self._ask_status()
        return READ_ONLY if self.read_only else self.blend_refusal

    def _store(self, plans: Sequence[ChunkPlan]) -> Generator[PrecomputeReport]:
        """The work is done by vLLM's workers, several documents at once."""
        yield from self._carried_out(plans, Cancellation())

    def _fill(
        self, plans: Sequence[ChunkPlan], conversation: str = ""
    ) -> Generator[PrecomputeReport]:
        """As ``_store``, while vLLM's workers are idle."""
        cancel = Cancellation(is_over=lambda: not self.is_open)
        yield from self._carried_out(plans, cancel, idle=True, conversation=conversation)

    def _carried_out(
        self, plans: Sequence[ChunkPlan], cancel: Cancellation, **options: Any
    ) -> Iterator[PrecomputeReport]:
        work = self._stored(self._runs(plans), cancel, **options)
        return iter(self.transport.background.stream(work, cancel))

    async def _stored(
        self, runs: Sequence[DocumentPlan], cancel: Cancellation, **options: Any
    ) -> AsyncIterator[PrecomputeReport]:
        """Have documents computed, several at a time; options: of the jobs."""
        waiting = iter(runs)
        at_work: dict[asyncio.Task[Result], DocumentPlan] = {}
        try:
            while not cancel.is_set():
                for run in islice(waiting, JOBS_AT_ONCE - len(at_work)):
                    job = self._precompute(run, **options)
                    at_work[asyncio.ensure_future(self.transport.carry_out(job))] = run
                if not at_work:
                    return
                done, _ = await asyncio.wait(
                    at_work, timeout=CANCEL_SECONDS, return_when=asyncio.FIRST_COMPLETED
                )
                for task in done:
                    yield _stored_by(task.result(), at_work.pop(task))
        finally:
            for task in at_work:
                task.cancel()

    def _precompute(self, run: DocumentPlan, **options: Any) -> Precompute:
        return Precompute(
            lead_in=self._led.id,
            tokens=tuple(run.tokens),
            chunks=tuple(Span(at, at + len(plan.token_ids)) for plan, at in run.members),
            context_start=len(run.members[0][0].lead),
            **options,
        )

    def _runs(self, plans: Sequence[ChunkPlan]) -> list[DocumentPlan]:
        """Group chunks into runs; chunks of a document that does not fit have no prior."""
        fits = self._fits
        return document_plans(
            plan if plan.is_turn or fits(plan, plan.context) else replace(plan, context=())
            for plan in plans
        )

    def _by_keys(
        self, kind: StoreKind, keys: Sequence[KVKey], conversation: str = ""
    ) -> Iterator[StoreJob]:
        for start in range(0, len(keys), MOST_KEYS):
            some = keys[start : start + MOST_KEYS]
            yield StoreJob(
                kind=kind,
                lead_in=self._led.id,
                keys=tuple((key.chunk_id, key.context_id) for key in some),
                conversation=conversation,
            )

    def _asked(self, job: Job, kind: type[ToldT], what: str) -> ToldT:
        """Return the result of a job; raises EngineUnavailableError when another one comes."""
        result = self.transport.run(self.transport.carry_out(job))
        if isinstance(result, kind):
            return result
        why: str = result.error if isinstance(result, Failed) else "no result came"
        raise EngineUnavailableError(f"vLLM did not {what}: {why}")

    def stored(self, keys: Sequence[KVKey]) -> Sequence[bool | None]:
        """Return for each key whether its KV is stored, on every replica if they share no folder.

        None while a tier fails that may hold it.

        Raises:
            EngineUnavailableError: when the connector does not say.
        """
        stored: list[bool | None] = []
        for job in self._by_keys("lookup", keys):
            told = self._asked(job, LookupResult, "look chunks up")
            found, unknown = set(told.found), set(told.unknown)
            stored += [None if i in unknown else i in found for i in range(len(job.keys))]
        return stored

    def stored_chunks(self) -> int | None:
        """Return how many chunks the server's store holds; see StoredKV."""
        self._ask_status()
        return self.status.store.chunks

    def _verify(self, keys: Sequence[KVKey]) -> Mapping[KVKey, Reason]:
        lost = dict[str, Reason]()
        for job in self._by_keys("verify", keys):
            lost |= self._asked(job, VerifyResult, "check the stored KV").unreadable
        names = {f"{key.chunk_id}/{key.context_id}": key for key in keys}
        return {names[name]: why for name, why in lost.items() if name in names}

    def _prefetch(self, keys: Sequence[KVKey]) -> None:
        self._begin(self._by_keys("prefetch", keys), "chunks were not prefetched")

    def _begin(self, jobs: Iterator[Job], failure: str) -> None:
        """Begin jobs in the background; failure: what is logged if one fails."""

        async def done() -> None:
            try:
                for job in jobs:
                    await self.transport.carry_out(job)
            except CacheBlendError as error:
                logger.warning("%s: %s", failure, error)

        self.transport.background.start(done())

    def _evict(self, keys: Sequence[KVKey], conversation: str = "") -> Evicted:
        evicted = Evicted()
        for job in self._by_keys("evict", keys, conversation):
            told = self._asked(job, EvictResult, "evict KV")
            evicted += Evicted(told.evicted, told.pending, is_noted=told.noted)
        return evicted

    def _evict_turns(self, keys: Sequence[KVKey], conversation: str) -> int:
        if keys and self.read_only:
            raise StoreError(READ_ONLY)
        return int(self._evict(keys, conversation))

    def _release(self) -> int:
        what = "release the memory of chunk KV"
        return self._asked(Ask(kind="release"), ReleaseResult, what).released

    def _forget(self, keys: Sequence[KVKey]) -> None:
        if keys:
            jobs = self._by_keys("evict", keys)
            self._begin(jobs, "chunks that others evicted were not dropped")

    def _close(self) -> None:
        self.transport.close()


def _stored_by(result: Result, run: DocumentPlan) -> PrecomputeReport:
    """Return the results of the chunks of a run."""
    match result:
        case PrecomputeResult():
            return PrecomputeReport(
                result.computed,
                result.skipped,
                result.computed_tokens,
                refused=result.refused,
                failed=result.failed,
            )
        case Failed(error=why):
            failed = {why: len(run.members)}
            return PrecomputeReport(refused=failed, failed=failed)
        case _:
            return PrecomputeReport()


def _ends_with_its_end(piece: Piece) -> bool:
    """Whether the last token of a piece is the one that ended the answer."""
    return piece.finish_reason == "stop" and not isinstance(piece.ended_by, str)


def _finish_reason(told: str | None, request: Request) -> FinishReason:
    if told == "error":
        raise EngineUnavailableError("vLLM ended the request with an error; see its log")
    told = told or ("abort" if request.cancel.is_set() else "stop")
    return cast(FinishReason, {"abort": "cancelled", "length": "length"}.get(told, "stop"))
