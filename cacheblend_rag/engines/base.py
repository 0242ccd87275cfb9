"""Engine: the contract that every engine keeps, and all of it that is the same on every engine.

A subclass says what it is (its facts), begins a request (``_start``), and does a store's verbs
(``_store``, ``_verify``, ``_prefetch``, ``_evict``, ``_release``). Generating, streaming, batches,
their asynchronous twins, known chunks and reports are made of these here, once.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import os
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import (
    AsyncIterator,
    Callable,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing, closing
from dataclasses import replace
from threading import Event
from typing import Any, ClassVar, Final, Self, cast
from weakref import WeakSet, ref

from tqdm import tqdm

from cacheblend_rag.blend.selectors import make_selector
from cacheblend_rag.engines.answer import Delta, FinishReason, Generation, Request
from cacheblend_rag.engines.background import CLOSED
from cacheblend_rag.engines.batch_order import grouped
from cacheblend_rag.engines.filling import Filling
from cacheblend_rag.engines.first_miss import FirstMiss
from cacheblend_rag.engines.known_chunks import EMPTY, Item, KnownChunks, whole_documents
from cacheblend_rag.engines.model_sampling import ModelSampling
from cacheblend_rag.engines.prepare import PreparedPrompt, PromptLike, PromptPreparer
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.engines.shutdown import working
from cacheblend_rag.engines.stream import Cancellation, Stream
from cacheblend_rag.engines.tally import Stored, Tally
from cacheblend_rag.errors import ConfigError, StoreError
from cacheblend_rag.kv.chunk_kv import KVKey
from cacheblend_rag.kv.store import READ_ONLY
from cacheblend_rag.prefill.lead_in import ChunkPlan, LeadIn
from cacheblend_rag.reason import Reason, ReasonCode
from cacheblend_rag.report import (
    BlendReport,
    FillReport,
    PhaseSeconds,
    PhaseStarts,
    PrecomputeReport,
    PrefillReport,
    reused_and_recomputed,
)
from cacheblend_rag.settings import (
    BlendConfig,
    LeadInConfig,
    check_namespace,
    check_request,
    settle,
)
from cacheblend_rag.text.chunk import Chunk
from cacheblend_rag.text.encoder import PromptEncoder, Tokenizer
from cacheblend_rag.text.registry import ChunkRegistry

logger = logging.getLogger(__name__)

Hints = Sequence[Chunk | str]
"""Chunks, or ids of documents, that a prompt is known to hold."""

FORGOTTEN = Reason(ReasonCode.FORGOTTEN, "forgotten meanwhile")
"""Of chunks whose KV was dropped again, as another writer no longer has them."""
TOO_LONG = Reason(ReasonCode.TOO_LONG, "longer than the context window")
UNSUPPORTED: Final = "unsupported model"


class Engine(ABC):
    """A model that answers prompts, and reuses the KV of the chunks in them.

    Attributes:
        name: the kind of engine, as reports name it.
        part_chunks: how many chunks are handed on to be stored at once, at least.
        model_name: the model's hub name, or its folder's own name.
        tokenizer: the model's.
        encoder: encodes prompts with it, and finds chunks among their tokens.
        config: of requests that bring none.
        lead_in: what chunks are computed behind.
        registry: known chunks.
        instruction: what prompts say before their first chunk.
        namespace: tenants with different namespaces never share KV.

    Safe to share between threads.
    """

    name: str
    part_chunks: ClassVar[int] = 64
    """Chunks that are handed on to be stored at once, at least, where there are as many."""

    def __init__(
        self,
        *,
        model_name: str,
        tokenizer: Any,
        identity: Mapping[str, Any],
        config: BlendConfig | None = None,
        lead_in: LeadInConfig | str | None = None,
        registry: ChunkRegistry | None = None,
        instruction: str | Callable[[Tokenizer], str] = "",
        namespace: str = "default",
        fill_on_miss: bool = False,
    ) -> None:
        """Settle what an engine is: the attributes of the same names, None for their defaults.

        Args:
            model_name: the model's hub name, or its folder's own name.
            tokenizer: the model's.
            identity: what the model's KV depends on, but for the lead-in (``model_identity``).
            config: of requests that bring none.
            lead_in: what chunks are computed behind, as settings or by its kind's name.
            registry: known chunks; several engines may share one.
            instruction: what prompts say before their first chunk; a function is given the
                tokenizer and returns it.
            namespace: tenants with different namespaces never share KV.
            fill_on_miss: whether registered chunks whose KV a request missed are computed and
                stored in the engine's idle time, as if by ``precompute``.

        Raises:
            ConfigError: when a setting is out of range.
        """
        check_namespace(namespace)
        self._fillings = WeakSet[Filling]()
        self.model_name, self.tokenizer, self.namespace = model_name, tokenizer, namespace
        self.config, lead_in = settled(config, lead_in)
        self.instruction = instruction if isinstance(instruction, str) else instruction(tokenizer)
        self._identity = dict(identity)
        self._closed, self._elder = False, cast("Self | None", None)
        self._pid = os.getpid()
        self._fingerprint_hook: Callable[[Engine, str], None] | None = None
        self._settle(lead_in, ChunkRegistry() if registry is None else registry)
        self.fill_on_miss = fill_on_miss

    def _settle(self, lead_in: LeadInConfig, registry: ChunkRegistry) -> None:
        """Make what depends on the lead-in and on the registry."""
        self.lead_in, self.registry = lead_in, registry
        self.encoder = PromptEncoder(
            self.tokenizer, split_special_tokens=lead_in.split_special_tokens
        )
        self._led = LeadIn(
            self.encoder,
            lead_in,
            instruction=self.instruction,
            identity=self._identity,
            namespace=self.namespace,
        )
        me = ref(self)  # held by what it holds, a dropped engine would keep its model for a while

        def evict(keys: Sequence[KVKey]) -> int:
            engine = me()
            return engine._evict(keys) if engine else 0

        def forget(chunks: Sequence[Chunk]) -> None:
            if (engine := me()) and engine.is_open:
                engine._forget(engine._known.removed_by_others(chunks))

        self._known = KnownChunks(registry, self._led, evict)
        registry.watch(forget)
        self._first_miss = FirstMiss(registry)

        def fill(chunks: Sequence[Chunk]) -> Generator[Stored, None, None]:
            if (engine := me()) and engine.is_open:
                yield from engine._filled(chunks)

        self._filling = Filling(registry, fill)
        self._fillings.add(self._filling)
        self._preparer = PromptPreparer(
            self.tokenizer, self.encoder, registry, self._led, self.context_window
        )

    # Facts

    @property
    @abstractmethod
    def context_window(self) -> int:
        """Most tokens a prompt and its answer may hold together."""

    @property
    @abstractmethod
    def blend_refusal(self) -> Reason | None:
        """Why nothing is blended: every request is then served by ordinary prefill. Or None."""

    @property
    def model_sampling(self) -> ModelSampling:
        """What a request's sampling fields take that are None: the model's own settings."""
        return ModelSampling()

    @property
    def address(self) -> str:
        """What ``open_engine`` takes to open the like of it: a name, or a server's URL."""
        return self.name

    @property
    def dtype(self) -> str | None:
        """Precision of the model's weights, None where it is not known here."""
        return None

    @property
    def fingerprint(self) -> str:
        """What this engine's chunk KV is stored under: model, tokenizer, lead-in, namespace.

        It changes with the model, where that can change while the engine lives.
        """
        self._refresh()
        return self._led.fingerprint

    def watch_fingerprint(self, hook: Callable[[Engine, str], None]) -> None:
        """Call a hook with this engine and its fingerprint, now and whenever that changes.

        Siblings call it, too. It must not ask the engine for its fingerprint.

        Args:
            hook: replaces the one that was given before.
        """
        self._refresh()
        self._fingerprint_hook = hook
        self._tell_fingerprint()

    @property
    def read_only(self) -> bool:
        """Whether its store is only read: what is not stored is computed anew with each prompt."""
        return False

    @property
    def has_chat_template(self) -> bool:
        """Whether prompts may be chat messages."""
        return bool(getattr(self.tokenizer, "chat_template", None))

    @property
    def is_open(self) -> bool:
        """Whether ``close`` has yet to be called."""
        return not self._closed and (self._elder is None or self._elder.is_open)

    @property
    def fill_on_miss(self) -> bool:
        """Whether registered chunks whose KV requests miss are computed in idle time.

        It may be changed at any time; what waits already is still filled.
        """
        return self._filling.is_on

    @fill_on_miss.setter
    def fill_on_miss(self, is_on: bool) -> None:
        self._filling.is_on = is_on

    # Prompts

    def tokenize(self, text: str) -> tuple[int, ...]:
        """Return the tokens of ``text`` as a chunk: what looks like a special token is text.

        Raises:
            PromptError: on unpaired surrogates.
        """
        return self.encoder.chunk(text)

    def key(self, chunk: Chunk) -> KVKey:
        """Return what a chunk's KV is stored under.

        Raises:
            PromptError: on unpaired surrogates.
        """
        self._refresh()
        return self._led.key(chunk)

    def prepare(self, prompt: PromptLike, hints: Hints = ()) -> PreparedPrompt:
        """Return a prompt's tokens, and the chunks that stand in it with the keys of their KV.

        Args:
            prompt: a text, a BlendPrompt or chat messages.
            hints: chunks, or ids of documents, that the prompt is known to hold.

        Raises:
            PromptError: when it is empty or longer than the context window.
        """
        self._check_open()
        return self._preparer.prepare(prompt, hints)

    # Index time

    def register(self, items: Iterable[Item]) -> None:
        """Make chunks known without computing anything (after a restart, say).

        Raises:
            PromptError: on empty text.
        """
        self._check_open()
        self._known.register(items)

    def precompute(
        self,
        items: Iterable[Item],
        *,
        progress: bool = True,
        register_only: bool = False,
        verify: bool = False,
    ) -> PrecomputeReport:
        """Register chunks and store their KV; what is stored already is skipped.

        A Document replaces what was known of its document_id in its collection before this call:
        chunks that it no longer has are forgotten and their KV dropped. Several Documents with one
        document_id in a call are variants of it and stand side by side. Chunks that are empty or
        longer than the context window are refused and counted. An interrupted run goes on where it
        stopped.

        Args:
            items: chunks, documents, or texts that stand alone.
            progress: whether a bar is shown.
            register_only: nothing is computed now; documents take the place of what was known of
                them all the same. An engine with ``fill_on_miss`` computes what requests miss.
            verify: what is stored already is read through, and computed anew where it is damaged.

        Returns:
            How many chunks were computed, skipped, refused and replaced, or only registered. Where
            ``failed`` is above 0, a tier failed or memory was short: call it again later.

        Raises:
            StoreError: when the store is read only.
        """
        self._check_writable()
        self._refresh()
        started, tally = time.perf_counter(), Tally()
        chunks, replaced = self._known.replace(items, tally.refused)
        if register_only:
            report = tally.report(time.perf_counter() - started, replaced)
            return replace(report, registered=len(chunks))
        refusal = self._storing_refusal() if chunks else None
        with tqdm(total=len(chunks), desc="precompute", unit="chunk", disable=not progress) as bar:
            for part in whole_documents(chunks, self.part_chunks):
                work = self._work_on(part, refusal, verify)
                with closing(work) as steps:  # an interrupt ends it, too
                    for done in steps:
                        tally.add(done)
                        bar.update(done.chunks)
                        self._check_open()
                tally.refused[FORGOTTEN] += self._known.drop_forgotten(part)
        return tally.report(time.perf_counter() - started, replaced)

    def _work_on(
        self, chunks: Iterable[Chunk], refusal: Reason | None, verify: bool
    ) -> Generator[Stored, None, None]:
        """Store chunks; yields what became of them, a few at a time."""
        plans, done = self._admitted(chunks, refusal)
        yield done
        if plans and verify:
            lost = self._verify([plan.key for plan in plans])
            plans = [plan for plan in plans if plan.key not in lost]
            for reason in lost.values():
                yield Stored.failure(reason)
        if plans:
            yield from self._store(plans)

    def _admitted(
        self, chunks: Iterable[Chunk], refusal: Reason | None
    ) -> tuple[list[ChunkPlan], Stored]:
        """Return the distinct chunks that can be stored, and what became of the others."""
        plans: dict[KVKey, ChunkPlan] = {}
        refused: Counter[Reason] = Counter()
        admitted = 0
        for chunk in chunks:
            plan = self._led.resolve(chunk)
            if reason := self._unfit(plan) or refusal:
                refused[reason] += 1
            else:
                plans[plan.key] = plan
                admitted += 1
        return list(plans.values()), Stored(skipped=admitted - len(plans), refused=refused)

    def _unfit(self, plan: ChunkPlan) -> Reason | None:
        """Say why a chunk cannot be computed, or None."""
        if not plan.token_ids:
            return EMPTY
        behind = plan.context if self._led.name == "document" else ()
        return None if self._fits(plan, behind) else TOO_LONG

    def _fits(self, plan: ChunkPlan, behind: tuple[int, ...]) -> bool:
        return len(plan.lead) + len(behind) + len(plan.token_ids) <= self._longest_run

    @property
    def _longest_run(self) -> int:
        """Most tokens of a lead-in, a context and a chunk together."""
        return self.context_window

    def fill_report(self) -> FillReport:
        """Return what was done so far about chunks that requests missed (``fill_on_miss``)."""
        return self._filling.report()

    def _filled(self, chunks: Sequence[Chunk]) -> Generator[Stored, None, None]:
        """Store chunks in idle time; those that are forgotten by then, or meanwhile, are not."""
        with working():
            self._refresh()
            known = [chunk for chunk in chunks if self._known.has(chunk)]
            refusal = self._storing_refusal() if known else None
            plans, done = self._admitted(known, refusal)
        yield done
        if plans:
            yield from self._fill(plans)
        lost = len(chunks) - len(known) + self._known.drop_forgotten(known)
        yield Stored(refused={FORGOTTEN: lost} if lost else {})

    def prefetch(self, hints: Iterable[Chunk | str]) -> None:
        """Start loading chunks into the fastest tier; returns at once.

        Args:
            hints: chunks, or ids of documents, which stand for all their chunks.
        """
        self._check_open()
        self._refresh()
        if keys := self._known.hinted(hints):
            self._prefetch(keys)

    def evict_document(self, document_id: str, collection: str | None = None) -> int:
        """Forget a document's chunks and drop their KV; returns how many were dropped.

        Args:
            document_id: the document.
            collection: only what was cut for it; None is all.

        Raises:
            StoreError: when the registry cannot be written, or the store is read only.
        """
        self._check_writable()
        self._refresh()
        return self._known.forget(document_id, collection)

    def evict_unregistered(self) -> int:
        """Drop the chunk KV of this engine's fingerprint that no registered chunk has.

        Writers that are killed, or change a registry that others index from, can leave some.
        Returns how many were dropped.

        Raises:
            ConfigError: when the engine does not tell what it stores.
            StoreError: when the registry cannot be read, or the store is read only.
        """
        self._check_writable()
        self._refresh()
        return self._evict(self._known.unregistered(self._stored_keys()))

    def release(self) -> int:
        """Free the memory that chunk KV takes, on the host and on the device; the engine lives on.

        Chunks stay known, and stored on disk, in Redis and in object stores: requests read them
        from there again. What was in memory only is computed again (``not stored``). Chunks that
        wait to be written, that requests are reading, or that are pinned, stay in memory until that
        is over. Buffers that copies pass through, and memory that PyTorch keeps for later, are
        freed besides. Engines around one store, siblings for example, share its memory.

        Returns:
            How many bytes of chunk KV and of buffers were freed.
        """
        self._check_open()
        return self._release()

    # Question time

    def generate(
        self,
        prompt: PromptLike,
        sampling: SamplingParams | None = None,
        *,
        config: BlendConfig | None = None,
        hints: Hints = (),
        cancel: Event | None = None,
    ) -> Generation:
        """Answer one prompt.

        Args:
            prompt: a text, a BlendPrompt or chat messages.
            sampling: how tokens are drawn; the defaults for None.
            config: how KV is fused; the engine's own for None.
            hints: chunks, or ids of documents, that the prompt is known to hold.
            cancel: set it to stop the work; what was generated so far is returned.

        Returns:
            The answer, with the report of what was reused.

        Raises:
            PromptError: when the prompt is empty or longer than the context window.
            ConfigError: when ``config`` does not suit the model or tells what is an engine's.
        """
        request = self._request(prompt, sampling, config, hints, cancel)
        return _generation(self._start(request).last())

    def generate_full(
        self,
        prompt: PromptLike,
        sampling: SamplingParams | None = None,
        *,
        hints: Hints = (),
        cache_salt: str | None = None,
    ) -> Generation:
        """Answer by ordinary prefill of the same tokens: the baseline to compare with.

        Args:
            prompt: as for generate.
            sampling: as for generate.
            hints: as given to generate, since they decide where a prompt is cut, hence its tokens.
            cache_salt: prompts with the same one may share the engine's own prefix cache, where it
                has one; without, nothing of earlier prompts is reused.

        Returns:
            The answer, whose report says that full prefill was asked for.

        Raises:
            PromptError: when the prompt is empty or longer than the context window.
        """
        request = self._request(
            prompt, sampling, None, hints, None, full=True, cache_salt=cache_salt
        )
        return _generation(self._start(request).last())

    def stream(
        self,
        prompt: PromptLike,
        sampling: SamplingParams | None = None,
        *,
        config: BlendConfig | None = None,
        hints: Hints = (),
        cancel: Event | None = None,
    ) -> Iterator[Delta]:
        """As generate, piece by piece; closing the iterator stops the work.

        Args:
            prompt: as for generate.
            sampling: as for generate.
            config: as for generate.
            hints: as for generate.
            cancel: as for generate.

        Returns:
            The steps; the last one carries the whole answer.

        Raises:
            PromptError: as generate, before anything is computed.
            ConfigError: as generate, before anything is computed.
        """
        request = self._request(prompt, sampling, config, hints, cancel, streamed=True)
        return iter(self._start(request))

    def generate_batch(
        self,
        prompts: Sequence[PromptLike],
        sampling: SamplingParams | None = None,
        *,
        config: BlendConfig | None = None,
        hints: Hints = (),
    ) -> list[Generation]:
        """Answer several prompts; all are checked before the first is served.

        Those that share chunks are served next to each other, so that KV is loaded once. When one
        fails the others are given up.

        Args:
            prompts: each as for generate.
            sampling: of all of them.
            config: of all of them.
            hints: chunks, or ids of documents, that any of the prompts is known to hold.

        Returns:
            An answer a prompt, in the prompts' order.

        Raises:
            PromptError: when a prompt is empty or longer than the context window.
            ConfigError: when ``config`` does not suit the model or tells what is an engine's.
        """
        requests = [self._request(prompt, sampling, config, hints, None) for prompt in prompts]
        order = grouped([[one.key for one in request.prepared.placed] for request in requests])
        try:
            begun = [iter(self._start(requests[index])) for index in order]
            answers = dict(zip(order, map(_last_of, begun), strict=True))
            return [answers[index] for index in range(len(requests))]
        finally:
            for request in requests:
                request.cancel.set()

    async def agenerate(
        self,
        prompt: PromptLike,
        sampling: SamplingParams | None = None,
        *,
        config: BlendConfig | None = None,
        hints: Hints = (),
    ) -> Generation:
        """As generate, off the event loop; cancelling the task stops the work.

        Args:
            prompt: as for generate.
            sampling: as for generate.
            config: as for generate.
            hints: as for generate.

        Returns:
            The answer, with the report of what was reused.

        Raises:
            PromptError: as generate.
            ConfigError: as generate.
        """
        request = await self._arequest(prompt, sampling, config, hints)
        async with aclosing(self._astart(request)) as deltas:
            async for delta in deltas:
                last = delta
        return _generation(last)

    async def astream(
        self,
        prompt: PromptLike,
        sampling: SamplingParams | None = None,
        *,
        config: BlendConfig | None = None,
        hints: Hints = (),
    ) -> AsyncIterator[Delta]:
        """As stream, off the event loop; leaving the loop over it stops the work.

        Args:
            prompt: as for generate.
            sampling: as for generate.
            config: as for generate.
            hints: as for generate.

        Yields:
            The steps; the last one carries the whole answer.

        Raises:
            PromptError: as generate, at the first step.
            ConfigError: as generate, at the first step.
        """
        request = await self._arequest(prompt, sampling, config, hints, streamed=True)
        async with aclosing(self._astart(request)) as deltas:
            async for delta in deltas:
                yield delta

    # Life

    def sibling(self, *, lead_in: LeadInConfig | str) -> Self:
        """Return an engine with another lead-in around the same model and store.

        It knows no chunks yet, and closes with this one.

        Args:
            lead_in: what it computes chunks behind, as settings or by its kind's name.
        """
        self._check_open()
        younger = copy.copy(self)
        younger._closed, younger._elder = False, self
        younger._settle(LeadInConfig.of(lead_in), ChunkRegistry())
        younger.fill_on_miss = self.fill_on_miss
        younger._tell_fingerprint()
        return younger

    def close(self) -> None:
        """Give up what is at work, and free what the engine holds."""
        if self._closed:
            return
        self._closed = True
        if os.getpid() != self._pid:
            return  # forked: threads, connections and memory are the parent's to end and free
        self._filling.close()
        if self._elder is None:
            for filling in list(self._fillings):  # siblings', too
                filling.close()
            self._close()

    # For subclasses

    @abstractmethod
    def _start(self, request: Request) -> Stream[Delta]:
        """Begin to answer; the stream's last item carries the Generation."""

    @abstractmethod
    def _store(self, plans: Sequence[ChunkPlan]) -> Generator[Stored, None, None]:
        """Compute and store the KV of those chunks that are not stored, a few at a time.

        plans: distinct chunks, whole documents in order. Closing the generator stops the work.
        """

    def _fill(self, plans: Sequence[ChunkPlan]) -> Generator[Stored, None, None]:
        """As ``_store``, when no request would wait for it; in a thread of its own.

        An engine that is closed meanwhile is waited for: it ends, or yields, within a moment.
        """
        yield from self._store(plans)

    @abstractmethod
    def _verify(self, keys: Sequence[KVKey]) -> Mapping[KVKey, Reason]:
        """Read the stored KV of keys through: what is damaged is not stored any more.

        Returns the keys whose KV stays stored though it cannot be read, with the reason.
        """

    @abstractmethod
    def _prefetch(self, keys: Sequence[KVKey]) -> None:
        """Start loading KV into the fastest tier."""

    @abstractmethod
    def _evict(self, keys: Sequence[KVKey]) -> int:
        """Drop the KV of keys; returns of how many there was any."""

    @abstractmethod
    def _release(self) -> int:
        """Free the memory that KV takes, and keep what is stored elsewhere; returns its bytes."""

    def _forget(self, keys: Sequence[KVKey]) -> None:
        """Let go of KV in memory that another writer has evicted from what is shared."""
        self._evict(keys)

    @abstractmethod
    def _close(self) -> None:
        """Free what this engine and its siblings hold; called once."""

    def _stored_keys(self) -> Iterable[KVKey]:
        """Return the keys of all KV that is stored under this engine's fingerprint."""
        raise ConfigError(f"a {self.name} engine does not tell which chunks it stores")

    def _storing_refusal(self) -> Reason | None:
        """Say why no chunk's KV can be stored now, or None."""
        if self.read_only:
            return READ_ONLY
        refusal = self.blend_refusal
        return None if refusal is None else Reason(refusal.code, UNSUPPORTED)

    def _refresh(self) -> None:  # noqa: B027 - most engines' models stay what they are
        """Take note of what has changed of the model: called before chunks are named by keys."""

    def _check_config(self, config: BlendConfig) -> None:  # noqa: B027 - most configs suit
        """Raise ConfigError when a request's config does not suit the model."""

    def _answered(
        self,
        request: Request,
        text: str,
        token_ids: Iterable[int],
        finish_reason: FinishReason,
        prefill: PrefillReport,
    ) -> Delta:
        """Return the last piece of a stream's metadata: the whole answer, with its report.

        Raises ConfigError when the engine was closed meanwhile.
        """
        self._check_open()
        prepared = request.prepared
        tokens = len(prepared.token_ids)
        reused, recomputed = reused_and_recomputed(prefill.chunks)
        chunks = prefill.chunks
        if not self.read_only:
            chunks = self._filling.see(prepared, chunks)
        answer = Generation(
            text=text,
            token_ids=tuple(token_ids),
            finish_reason=finish_reason,
            prompt_tokens=tokens,
            report=BlendReport(
                engine=self.name,
                blended=prefill.blended,
                reason=prefill.reason,
                prompt_tokens=tokens,
                reused_tokens=reused,
                recomputed_tokens=recomputed,
                computed_tokens=tokens - reused - recomputed if prefill.was_run else 0,
                recompute_ratio=prefill.ratio,
                selector=prefill.selector,
                selector_reason=prefill.selector_reason,
                ratio_reason=prefill.ratio_reason,
                lead_in=self._led.name,
                compute_share=prefill.compute_share,
                seconds=PhaseSeconds(prepare=prepared.seconds, **prefill.seconds),
                chunks=(*chunks, *prepared.unmatched),
                request_id=request.request_id,
                starts=PhaseStarts.of(prefill.starts, request.made_at - prepared.seconds),
                trace=prefill.trace,
            ),
            sampling=request.sampling,
        )
        self._first_miss.see(prepared.text, prepared.expects_chunks, answer)
        return Delta("", answer)

    # Inside

    def _identify(self, identity: Mapping[str, Any]) -> None:
        """Go on as the engine of a model with another identity (``model_identity``)."""
        self._identity = dict(identity)
        self._led.identify(self._identity)
        self._tell_fingerprint()

    def _tell_fingerprint(self) -> None:
        if self._fingerprint_hook is not None:
            self._fingerprint_hook(self, self._led.fingerprint)

    def _request(
        self,
        prompt: PromptLike,
        sampling: SamplingParams | None,
        config: BlendConfig | None,
        hints: Hints,
        cancel: Event | None,
        **options: Any,
    ) -> Request:
        """Check and prepare; raises PromptError and ConfigError before any work is done."""
        config = checked(config or self.config)
        self._check_config(config)
        prepared = self.prepare(prompt, hints)
        settings = self.model_sampling.resolve(sampling or SamplingParams())
        settings = replace(settings, max_tokens=min(settings.max_tokens, prepared.room))
        stop = Cancellation(cancel, lambda: not self.is_open)
        return Request(prepared, settings, config, cancel=stop, **options)

    async def _arequest(
        self,
        prompt: PromptLike,
        sampling: SamplingParams | None,
        config: BlendConfig | None,
        hints: Hints,
        **options: Any,
    ) -> Request:
        return await asyncio.to_thread(
            self._request, prompt, sampling, config, hints, None, **options
        )

    def _astart(self, request: Request) -> Any:
        return aiter(self._start(request))

    def _check_writable(self) -> None:
        """Raise ConfigError once the engine is closed, StoreError where its store is only read."""
        self._check_open()
        if self.read_only:
            raise StoreError(READ_ONLY)

    def _check_open(self) -> None:
        """Raise ConfigError once the engine is closed, or in a process that was forked."""
        if not self.is_open:
            raise ConfigError(CLOSED)
        if os.getpid() != self._pid:
            raise ConfigError(
                f"the engine was opened in process {self._pid}, and its threads did not come along"
                f" when this one was forked: open an engine in process {os.getpid()}"
            )


def settled(
    config: BlendConfig | None, lead_in: LeadInConfig | str | None
) -> tuple[BlendConfig, LeadInConfig]:
    """Return an engine's settings, as ``settle`` does; raises ConfigError for a wrong selector."""
    config, lead_in = settle(config, lead_in)
    return checked(config), lead_in


def checked(config: BlendConfig) -> BlendConfig:
    """Return a request's config.

    Of what a config holds, the rest is checked when it is made. Raises ConfigError when its
    selector is none, or when it tells what is an engine's.
    """
    check_request(config)
    make_selector(config.selector, config.selector_options)
    return config


def _last_of(deltas: Iterator[Delta]) -> Generation:
    *_, last = deltas
    return _generation(last)


def _generation(last: Delta) -> Generation:
    return cast(Generation, last.generation)
