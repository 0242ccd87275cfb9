"""The embedded engine: precomputes, blends and answers on any Hugging Face decoder, in process."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast
from weakref import finalize, proxy

import torch
from torch import nn

from cacheblend_rag.blend import FusedKV, plan_schedule
from cacheblend_rag.blend.copy_stream import release_buffers
from cacheblend_rag.blend.steps import Steps
from cacheblend_rag.engines.answer import CANCELLED, Delta, Generation, Request
from cacheblend_rag.engines.answering import Hints
from cacheblend_rag.engines.backend import EngineSetup, engine_settings
from cacheblend_rag.engines.base import Engine
from cacheblend_rag.engines.lifetime import CLOSED, IdleJob
from cacheblend_rag.engines.model_files import context_window_in
from cacheblend_rag.engines.prefixes import MOST_WAITING, Prefixes
from cacheblend_rag.engines.prepare import PreparedPrompt, PromptLike
from cacheblend_rag.engines.sampling import ResolvedSampling, SamplingParams, warn_of_ignored
from cacheblend_rag.engines.stored_chunks import StoredChunks, finder_of
from cacheblend_rag.engines.stream import Stream, Take
from cacheblend_rag.engines.transformers.batches import (
    MODEL_CHANGED,
    compute_batches,
    store_computed,
)
from cacheblend_rag.engines.transformers.decoding import Decoding, eos_token_ids
from cacheblend_rag.engines.transformers.guiding import Guides
from cacheblend_rag.engines.transformers.loading import GivenModel
from cacheblend_rag.engines.transformers.loop import NOTHING, Work, loop_of
from cacheblend_rag.engines.transformers.ordinary_prefill import OrdinaryPrefill
from cacheblend_rag.engines.transformers.prefill import (
    ContinuationScore,
    Prefill,
    Prefilled,
    check_scored,
    decodable,
    forced_log_probs,
)
from cacheblend_rag.engines.transformers.stack import TransformersStack
from cacheblend_rag.engines.transformers.watched_model import WatchedModel
from cacheblend_rag.errors import CacheBlendError, ConfigError, OutOfMemoryError
from cacheblend_rag.kv.chunk_kv import KVKey
from cacheblend_rag.kv.store import TieredKVStore
from cacheblend_rag.memory import Lack, give_back_unused, unless_lacking
from cacheblend_rag.models import public_name
from cacheblend_rag.prefill.comparing import Compared, Comparison
from cacheblend_rag.prefill.lead_in import ChunkPlan, LeadInId, PlacedChunk
from cacheblend_rag.prefill.precompute import Computed, compute_chunks, compute_one_by_one
from cacheblend_rag.reason import Reason
from cacheblend_rag.report import Evicted, PrecomputeReport
from cacheblend_rag.settings import BlendConfig, GuardConfig, LeadInConfig
from cacheblend_rag.settings.tier_url import TierUrl
from cacheblend_rag.text.encoder import Tokenizer
from cacheblend_rag.text.registry import ChunkRegistry

logger = logging.getLogger(__name__)

T = TypeVar("T")


class TransformersEngine(Engine):
    """The embedded engine.

    Requests take turns, a layer at a time, and decode together, including those of other engines
    around the same model: one thread runs it for all of them. Nothing else may use the model.

    Attributes:
        model: the loaded model.
        store: where chunk KV is kept.
        prefixes: looks up the KV of prompt prefixes in the store, and writes it after answers.
    """

    name = "transformers"
    keeps_turns = True

    def __init__(
        self,
        model: str | Path | nn.Module,
        *,
        tokenizer: Any = None,
        config: BlendConfig | None = None,
        store: TieredKVStore | None = None,
        registry: ChunkRegistry | None = None,
        instruction: str | Callable[[Tokenizer], str] = "",
        namespace: str = "default",
        lead_in: LeadInConfig | str | None = None,
        fill_on_miss: bool = False,
        guard: GuardConfig | None = None,
        device: str | None = None,
        dtype: str | torch.dtype | None = None,
        catalog: Path | TierUrl | None = None,
    ) -> None:
        """Load a model, and test whether it can be blended.

        Args:
            model: a name (``smollm2``, a GGUF file, a folder in hub format, a hub name),
                or a loaded causal language model, also one in a wrapper (PEFT's, or what
                ``torch.compile`` gives). An engine is for the weights and active adapters that it
                has now, and refuses requests while it has others. Compiled parts are run
                uncompiled.
            tokenizer: the model's own by default; must be given with a loaded model.
            config: the default for requests without one.
            store: where chunk KV is kept; by default 4 GiB of host memory.
            registry: known chunks; several engines may share one.
            instruction: the text of prompts before their first chunk; lead-ins ``instruction`` and
                ``document`` compute chunks after it. A function gets the tokenizer and returns the
                text.
            namespace: tenants with different namespaces never share KV.
            lead_in: the text that chunks are computed after, as settings or by its kind's name.
            fill_on_miss: whether registered chunks whose KV a request missed, and passages that
                begin a second prompt in the same order, are computed when no request wants the
                model: also between calls, so with a loaded model that nothing else uses.
            guard: how the quality of blended answers is watched; None is not at all.
            device: where a model given by name is loaded.
            dtype: in what precision it is loaded.
            catalog: the folder or tier that keeps the tokens of stored chunks, by which they are
                found in prompts (``place_of`` a StoreConfig); by default this process' memory.

        Raises:
            ModelLoadError: when the model or tokenizer cannot be loaded.
            ConfigError: when a setting is wrong or does not suit the model. A model that cannot be
                blended is served by ordinary prefill; ``blend_refusal`` says why.
        """
        config, lead_in = engine_settings(config, lead_in)
        given = GivenModel.of(model, tokenizer, device, dtype)
        self.model = given.model
        self.store = TieredKVStore.open() if store is None else store
        self._loop = loop_of(self.model)
        self._watched = WatchedModel(self.model, self._loop, self.store, name=given.loaded_by)
        self.prefixes = Prefixes(self.store, namespace)
        self.namespace = namespace
        self._tried = tried = self._watched.tried
        self._stack, self._ordinary = tried.stack, tried.ordinary
        self._check_config(config)
        self._eos = eos_token_ids(self.model, given.tokenizer)
        width = max(self.model.config.get_text_config().vocab_size, len(given.tokenizer))
        self._guides = Guides(given.tokenizer, width, self._eos)
        warn_of_ignored(self._generation_values)
        super().__init__(
            EngineSetup(
                model_name=public_name(given.name),
                tokenizer=given.tokenizer,
                identity=self._tried.identity,
                config=config,
                lead_in=lead_in,
                registry=registry,
                instruction=instruction,
                namespace=namespace,
                fill_on_miss=fill_on_miss,
                guard=guard,
            )
        )
        self._finder = finder_of(
            catalog,
            self._tried.identity,
            self.tokenizer,
            read_only=self.read_only,
            unconfirmed_context=self.lead_in.unconfirmed_context,
            keeps_exact=self.store.precision == "native",
        )
        finalize(self, self._finder.close)

    # Facts

    @property
    def context_window(self) -> int:
        """Most tokens a prompt and its answer may hold together."""
        return context_window_in(self.model.config.get_text_config())

    @property
    def dtype(self) -> str:
        """Precision of the model's weights."""
        return str(self.model.dtype).removeprefix("torch.")

    @property
    def blend_refusal(self) -> Reason | None:
        """Why the model cannot be blended, or None."""
        return self._tried.refusal

    @property
    def model_sampling(self) -> ResolvedSampling:
        """The settings of ``model.generation_config``, as they are now."""
        return ResolvedSampling.of_model(self._generation_values)

    @property
    def _generation_values(self) -> dict[str, Any]:
        return vars(self.model.generation_config) if self.model.generation_config else {}

    @property
    def read_only(self) -> bool:
        """Whether its store is only read."""
        return self.store.read_only

    @property
    def _token_bytes(self) -> int:
        return 0 if self._stack is None else FusedKV.bytes_for(self._stack.geometry, 1)

    def _check_config(self, config: BlendConfig) -> None:
        self._watched.check()
        if self._stack is not None:
            plan_schedule(config, self._stack.geometry.layers)

    def _check_sampling(self, sampling: ResolvedSampling) -> None:
        if sampling.structured_outputs is not None:
            self._guides.guide(sampling.structured_outputs)

    def _is_idle(self) -> bool:
        """Whether no engine around the model runs it, or is between two steps of an answer."""
        return self._loop.is_idle

    # Stored chunks in a prompt's tokens

    @property
    def found_chunks(self) -> StoredChunks:
        """The search for its stored chunks in prompts."""
        return StoredChunks(self._finder, self._led)

    def _find(self, prompt: PreparedPrompt) -> Sequence[PlacedChunk]:
        return self.found_chunks.find(prompt)

    # A request: prefill, then decode

    def _start(self, request: Request) -> Stream[Delta]:
        def begin(push: Take[Delta]) -> Future[Delta]:
            work = self._with_room(request, self._answer(request, push))
            return self._loop.begin(work, request.cancel, streamed=request.streamed)

        return Stream(begin, request.cancel)

    def _with_room(self, request: Request, work: Work[T]) -> Work[T]:
        """Do a request's work; raises OutOfMemoryError when it finds no memory."""
        done = yield from unless_lacking(work)
        if not isinstance(done, Lack):
            return done
        raise OutOfMemoryError(
            f"no memory on {self.model.device} to answer a prompt of "
            f"{len(request.prepared.token_ids):,} tokens: shorten it or lower max_tokens, or free "
            f"memory (engine.release() frees chunk KV): {done.why}"
        )

    def _prefill(self, request: Request) -> Prefill:
        """Return the prefill of a request; raises ConfigError when the model has changed."""
        self._watched.check()
        return Prefill(request, self._tried, self.store, self.prefixes)

    def _answer(self, request: Request, push: Take[Delta]) -> Work[Delta]:
        """Push text as it becomes final; returns the last piece, which is pushed, too."""
        work = self._prefill(request)
        request, ordinary = work.request, work.tried.ordinary
        prefilled = yield from work.run()
        if prefilled is None:
            last = self._answered(request, "", (), "cancelled", CANCELLED)
            push(last)
            return last
        tell = partial(self._answered, request)
        last = yield from self._decoded(request, prefilled, ordinary, push, tell)
        push(last)
        self._keep(work, prefilled)
        return last

    def _keep(self, work: Prefill, prefilled: Prefilled) -> None:
        """Queue a finished request's KV for the store, unless the model has changed."""
        with suppress(CacheBlendError):
            if self._watched.is_current:
                prompt = work.request.prepared
                is_known = prompt.prepared_for.generation == self.registry.generation
                work.keep(prefilled, whole=is_known)
                if is_known and self.fill_on_miss and (again := work.again()):
                    steps = partial(type(self)._compute, proxy(self), again)
                    self._idle.add(IdleJob("prefix", steps, priority=-1, most=MOST_WAITING))

    def _compute(self, work: Prefill) -> Generator[None]:
        """Compute and keep what several prompts began with, a layer at a time."""
        prefilled = yield from self._loop.stepwise(work.run())
        if prefilled is not None and self._watched.is_current:
            work.keep(prefilled, whole=True)
            self.prefixes.drain()

    def _decoded(
        self,
        request: Request,
        prefilled: Prefilled,
        ordinary: OrdinaryPrefill,
        push: Take[Delta],
        tell: Callable[..., Delta],
    ) -> Work[Delta]:
        """Decode after a prefill; see ``Decoding.steps``."""
        form = request.sampling.structured_outputs
        guide = None if form is None else self._guides.guide(form)
        answer = Decoding(request, prefilled, tokenizer=self.tokenizer, ends=self._eos, guide=guide)
        return (yield from answer.steps(ordinary, push, tell))

    def score(
        self,
        prompt: PromptLike,
        continuation: Sequence[int],
        *,
        config: BlendConfig | None = None,
        hints: Hints = (),
        full: bool = False,
    ) -> ContinuationScore:
        """Return how likely every token was at each step of a given answer.

        Args:
            prompt: as for generate. It is prefilled as generate does, so that the given answer has
                no part in the choice of what is recomputed.
            continuation: the answer's tokens, at least one.
            config: as for generate.
            hints: as for generate.
            full: whether to prefill without stored KV, as generate_full does.

        Raises:
            PromptError: when the prompt is empty.
            PromptTooLongError: when prompt and answer are longer than the context window.
            ConfigError: when there is no token to score, or ``config`` does not suit the model.
            OutOfMemoryError: when there is no memory for it.
        """
        prepared, one = self.prepare(prompt, hints), SamplingParams.greedy(max_tokens=1)
        check_scored(len(prepared.token_ids), [continuation], self.context_window)
        _, (score,) = self.generate_and_score(
            prepared, one, lambda _: [continuation], config=config, full=full
        )
        return score

    def generate_and_score(
        self,
        prompt: PromptLike,
        sampling: SamplingParams,
        continuations: Callable[[Generation], Sequence[Sequence[int]]],
        *,
        config: BlendConfig | None = None,
        hints: Hints = (),
        full: bool = False,
    ) -> tuple[Generation, tuple[ContinuationScore, ...]]:
        """Return an answer, and the scores of given answers, after one prefill.

        prompt, config, hints, full: as for score. sampling: how the answer is drawn. continuations:
        gets the answer, and returns the answers to score; it must not call the engine.
        """

        def answer_and_score() -> Work[tuple[Generation, tuple[ContinuationScore, ...]]]:
            work = self._prefill(request)
            prefilled = yield from work.run()
            if prefilled is None:
                raise ConfigError(CLOSED)
            tell = partial(self._answered, work.request, hooks=False)
            last = yield from self._decoded(
                work.request, decodable(prefilled), self._ordinary, lambda _: None, tell
            )
            told = cast(Generation, last.generation)
            answers = continuations(told)
            check_scored(told.prompt_tokens, answers, self.context_window)
            return told, (yield from self._scores(work.request, prefilled, answers))

        request = self._request(prompt, sampling, config, hints, steered=False, full=full)
        return self._loop.run(self._with_room(request, answer_and_score()), request.cancel)

    def _scores(
        self, request: Request, prefilled: Prefilled, answers: Sequence[Sequence[int]]
    ) -> Work[tuple[ContinuationScore, ...]]:
        """Score given answers, a step each."""
        ids, report = request.prepared.token_ids, self._report(request, prefilled.report)
        scores: list[ContinuationScore] = []
        for answer in answers:
            yield NOTHING
            found = forced_log_probs(self._ordinary, prefilled, ids, answer)
            scores.append(ContinuationScore(found, report))
        return tuple(scores)

    def _compare(self, request: Request, compared: Compared) -> Steps[Comparison | None]:
        """As every engine; None also if adapters or weights change meanwhile."""
        work = self._prefill(request)
        done = yield from self._loop.stepwise(work.compare(compared))
        return done if self._watched.is_current else None

    # The store's operations

    def _store(self, plans: Sequence[ChunkPlan]) -> Generator[PrecomputeReport]:
        """Each chunk is stored as soon as it is computed."""
        return self.compute_and_store(plans, self._led.id)

    def _fill(
        self, plans: Sequence[ChunkPlan], conversation: str = ""
    ) -> Generator[PrecomputeReport]:
        """As ``_store``, one layer of one chunk at a time, while the model is idle."""
        return self.compute_and_store(plans, self._led.id, conversation, when_idle=True)

    def compute_and_store(
        self,
        plans: Sequence[ChunkPlan],
        lead_in: LeadInId,
        conversation: str = "",
        *,
        when_idle: bool = False,
    ) -> Generator[PrecomputeReport]:
        """Compute and store the KV of those chunks that are not stored, a few at a time.

        Args:
            plans: distinct chunks, whole documents in order.
            lead_in: that they are computed after.
            conversation: the key of the one whose turns they are, or "".
            when_idle: whether one layer of one chunk at a time, while nothing else wants the model.
        """
        stack = cast(TransformersStack, self._stack)
        self.found_chunks.learn(plans, lead_in, conversation)

        def alone(chunks: list[ChunkPlan]) -> Computed:
            if when_idle:
                return compute_one_by_one(stack, chunks, self.store)
            return compute_batches(stack, chunks)

        in_document = lead_in.name == "document"
        steps = compute_chunks(
            stack, plans, self.store, alone=alone, in_document=in_document, leaves_out=True
        )
        made = self._loop.each(steps, idle=when_idle)
        return store_computed(self.store, plans, made, lambda: self._watched.is_current)

    def _storing_refusal(self) -> Reason | None:
        changed = None if self._watched.is_current else MODEL_CHANGED
        return super()._storing_refusal() or changed

    def _verify(self, keys: Sequence[KVKey]) -> Mapping[KVKey, Reason]:
        return dict(self.store.unreadable(keys))

    def _prefetch(self, keys: Sequence[KVKey]) -> None:
        self.store.prefetch(keys)

    def _evict(self, keys: Sequence[KVKey]) -> Evicted:
        return self.evict_stored(keys, self._led.id)

    def _evict_turns(self, keys: Sequence[KVKey], conversation: str) -> int:
        return int(self.evict_stored(keys, self._led.id, conversation))

    def evict_stored(
        self, keys: Sequence[KVKey], lead_in: LeadInId, conversation: str = ""
    ) -> Evicted:
        """Drop the KV of keys, and find their chunks no more; returns how many chunks were stored.

        Args:
            keys: of chunks computed after ``lead_in``.
            lead_in: what they were computed after.
            conversation: the key of the one whose turns they are, or "".
        """
        self.found_chunks.forget(keys, lead_in, conversation)
        if keys and not conversation:
            self.prefixes.passages.drop(self.store)
        evicted = {key: self.store.evict(key) for key in keys}
        whole = sum(evicted.values(), Evicted())
        dropped = {
            (key.chunk_id, key.context_id) for key, was_there in evicted.items() if was_there
        }
        return Evicted(len(dropped), whole.pending, is_noted=whole.is_noted)

    def _release(self) -> int:
        freed = self.store.release() + release_buffers(self.model.device)
        give_back_unused()
        return freed

    def _forget(self, keys: Sequence[KVKey]) -> None:
        self.found_chunks.forget(keys, self._led.id)
        if keys:
            self.prefixes.passages.drop(self.store)
        self.store.forget(keys)

    def stored(self, keys: Sequence[KVKey]) -> Sequence[bool | None]:
        """Return for each key whether its KV is stored; None if a tier that fails may hold it."""
        return self.store.stored_many(keys)

    def _stored_keys(self) -> list[KVKey]:
        fingerprint = self.fingerprint
        return [key for key in self.store.entries() if key.fingerprint == fingerprint]

    def _close(self) -> None:
        self._loop.call(lambda: None)  # after it has ended all requests, which are cancelled
        self._finder.close()
        self.prefixes.close()
        self.store.close()
