"""The public contract of all engines; a subclass implements Backend."""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from threading import Event
from typing import Any, Self

from cacheblend_rag.blend.steps import run_to_end
from cacheblend_rag.engines import guard
from cacheblend_rag.engines.after_answer import AnswerHook
from cacheblend_rag.engines.answer import Delta, Generation
from cacheblend_rag.engines.backend import Backend
from cacheblend_rag.engines.idle import IdleJob
from cacheblend_rag.engines.known_chunks import Item
from cacheblend_rag.engines.lifetime import Lifetime
from cacheblend_rag.engines.parts import EngineParts, EngineSetup, Family
from cacheblend_rag.engines.prepare import PreparedPrompt, PromptLike
from cacheblend_rag.engines.question_time import Hints
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.kv.chunk_kv import KVKey
from cacheblend_rag.prefill.comparing import Compared, Comparison
from cacheblend_rag.report import Evicted, FillReport, GuardReport, PrecomputeReport
from cacheblend_rag.settings import BlendConfig, GuardConfig, LeadInConfig
from cacheblend_rag.text.chunk import Chunk


class Engine(Backend):
    """A model that answers prompts, and reuses the KV of the chunks in them.

    Safe to share between threads. Backend, which a subclass implements, has further properties,
    such as ``context_window``, ``blend_refusal``, ``dtype`` and ``read_only``.

    Attributes:
        name, part_chunks: as in Backend.
        model_name, tokenizer, instruction, namespace: as in EngineSetup.
        config, lead_in, registry: as in EngineSetup, with defaults for None.
        encoder: encodes prompts with the tokenizer, and finds chunks in their tokens.
    """

    def __init__(self, setup: EngineSetup) -> None:
        """Create an engine from the settings of its subclass and its user."""
        self._lifetime, self._family = Lifetime(), Family(setup.identity)
        self._settle(setup)

    def _settle(self, setup: EngineSetup) -> None:
        """Create the parts for one lead-in and one registry."""
        parts = self._parts = EngineParts(self, setup, self._lifetime, self._family)
        self.model_name, self.tokenizer = setup.model_name, setup.tokenizer
        self.config, self.lead_in, self.registry = parts.config, parts.lead_in, parts.registry
        self.instruction, self.namespace = parts.instruction, setup.namespace
        self.encoder, self._led = parts.encoder, parts.led
        self._index, self._questions = parts.index_time, parts.question_time
        self._answered = parts.question_time.answered

    # Facts

    @property
    def fingerprint(self) -> str:
        """The hash that is part of all KV keys: model, tokenizer, lead-in, namespace.

        It changes if the model changes while the engine is open.
        """
        self._refresh()
        return self._led.fingerprint

    def watch_fingerprint(self, hook: Callable[[Engine, str], None]) -> None:
        """Call a hook with this engine and its fingerprint, now and whenever that changes.

        It replaces an earlier hook. Siblings call it, too. It must not read ``fingerprint``.
        """
        fingerprint, self._family.fingerprint_hook = self.fingerprint, hook
        hook(self, fingerprint)

    @property
    def has_chat_template(self) -> bool:
        """Whether prompts may be chat messages."""
        return bool(getattr(self.tokenizer, "chat_template", None))

    @property
    def is_open(self) -> bool:
        """Whether ``close`` was not called yet."""
        return self._lifetime.is_open

    @property
    def fill_on_miss(self) -> bool:
        """Whether registered chunks whose KV a request missed are stored in idle time.

        As if by ``precompute``. It may be changed at any time; waiting chunks are still filled.
        """
        return self._parts.filling.is_on

    @fill_on_miss.setter
    def fill_on_miss(self, is_on: bool) -> None:
        self._parts.filling.is_on = is_on

    @property
    def guard(self) -> GuardConfig | None:
        """How the quality of blended answers is watched, or None; setting it begins anew."""
        return self._parts.guard.config

    @guard.setter
    def guard(self, config: GuardConfig | None) -> None:
        self._parts.guard.use(config, self.config.ratio)

    def tokenize(self, text: str) -> tuple[int, ...]:
        """Return the tokens of ``text`` as a chunk, without special tokens."""
        return self.encoder.chunk(text)

    def key(self, chunk: Chunk) -> KVKey:
        """Return the key of a chunk's KV."""
        self._refresh()
        return self._led.key(chunk)

    def prepare(self, prompt: PromptLike, hints: Hints = ()) -> PreparedPrompt:
        """Return a prompt's tokens, and the chunks in it with the keys of their KV.

        Args:
            prompt: as for generate. A PreparedPrompt is prepared again if its engine had another
                fingerprint, registry or context window, or if chunks were registered or forgotten
                since; else it is returned as it is.
            hints: as for generate; none with a PreparedPrompt, which keeps its own.

        Raises:
            PromptError: when it is empty or longer than the context window.
        """
        return self._questions.prepare(prompt, hints)

    # Index time

    def register(self, items: Iterable[Item]) -> None:
        """Register chunks without computing anything (after a restart, say)."""
        self._index.register(items)

    def precompute(
        self,
        items: Iterable[Item],
        *,
        progress: bool = True,
        register_only: bool = False,
        verify: bool = False,
    ) -> PrecomputeReport:
        """Register chunks and store their KV; chunks that are stored already are skipped.

        A Document replaces the one with its document_id in its collection: chunks that it no longer
        has are forgotten and their KV dropped. Several Documents with one document_id in one call
        are variants that are kept side by side. An interrupted run continues where it stopped.

        Args:
            items: chunks, documents, or texts that stand alone.
            progress: whether to show a progress bar.
            register_only: compute nothing now; documents still replace their earlier versions. An
                engine with ``fill_on_miss`` computes the chunks that requests miss.
            verify: check chunks that are stored already, and recompute damaged ones.

        Returns:
            How many chunks were computed, skipped, refused and replaced, or only registered. If
            ``failed`` is above 0, a tier failed or memory was short: call it again later.

        Raises:
            StoreError: when the store is read only.
        """
        return self._index.precompute(items, progress, register_only, verify)

    def fill_report(self) -> FillReport:
        """Return the counts of filling missed chunks so far (``fill_on_miss``)."""
        return self._parts.filling.report()

    def guard_report(self) -> GuardReport:
        """Return the guard's state, and its counts so far (``guard``)."""
        return self._parts.guard.report()

    def reset_guard(self) -> None:
        """Let the guard begin anew: the ratio is not raised, and blending goes on."""
        self.guard = self._parts.guard.config

    def prefetch(self, hints: Iterable[Chunk | str]) -> None:
        """Start loading chunks, and documents by their ids, into the fastest tier."""
        self._index.prefetch(hints)

    def evict_document(
        self, document_id: str, collection: str | None = None, *, kept: Sequence[Chunk] = ()
    ) -> Evicted:
        """Forget a document's chunks and drop their KV.

        Args:
            document_id: the document.
            collection: only the chunks of this collection; None is all.
            kept: chunks that the document still has.

        Returns:
            How many chunks were dropped, a number; ``pending`` names the tiers that did not answer.

        Raises:
            StoreError: when the registry cannot be written, or the store is read only.
        """
        return self._index.evict_document(document_id, collection, kept)

    def evict_unregistered(self) -> Evicted:
        """Drop this engine's chunk KV that belongs to no registered chunk.

        Killed writers can leave such KV. Returns how many were dropped, as ``evict_document``.

        Raises:
            ConfigError: when the engine cannot list its stored chunks.
        """
        return self._index.evict_unregistered()

    def release(self) -> int:
        """Free the memory of chunk KV, on host and device; returns how many bytes that were.

        Chunks stay registered, and stored on disk, in Redis and in object stores, from where
        requests read them again. Chunks that were in memory only are computed again
        (``not stored``). Chunks that wait to be written, are being read, or are pinned, stay in
        memory until then. Buffers for copies and PyTorch's cached memory are freed, too. The engine
        stays open. Engines around one store, such as siblings, share its memory.
        """
        self._lifetime.check()
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
            prompt: a text, a BlendPrompt, chat messages, or the result of ``prepare`` for one of
                them.
            sampling: how tokens are sampled; the defaults for None.
            config: how KV is blended; the engine's own for None.
            hints: chunks, or ids of documents, that the prompt is known to hold.
            cancel: set it to stop the work; what was generated so far is returned.

        Returns:
            The answer, with the report of what was reused.

        Raises:
            PromptError: when the prompt is empty or longer than the context window.
            ConfigError: when ``config`` does not suit the model, or names an unknown selector.
        """
        request = self._questions.request(prompt, sampling, config, hints, cancel=cancel)
        return self._questions.generate(request)

    def generate_full(
        self,
        prompt: PromptLike,
        sampling: SamplingParams | None = None,
        *,
        hints: Hints = (),
        cache_salt: str | None = None,
    ) -> Generation:
        """Return the answer by ordinary prefill of the same tokens: the baseline to compare with.

        Args:
            prompt: as for generate.
            sampling: as for generate.
            hints: as given to generate, since they affect a prompt's segments and tokens.
            cache_salt: prompts with the same one may share the engine's own prefix cache, if it
                has one; without it, nothing of earlier prompts is reused.
        """
        options: dict[str, Any] = {"full": True, "cache_salt": cache_salt}
        request = self._questions.request(prompt, sampling, None, hints, **options)
        return self._questions.generate(request)

    def stream(
        self,
        prompt: PromptLike,
        sampling: SamplingParams | None = None,
        *,
        config: BlendConfig | None = None,
        hints: Hints = (),
        cancel: Event | None = None,
    ) -> Iterator[Delta]:
        """Yield the answer piece by piece, the last with the report; closing it stops the work.

        Args:
            prompt: as for generate; errors come before anything is computed.
            sampling: as for generate.
            config: as for generate.
            hints: as for generate.
            cancel: as for generate.
        """
        request = self._questions.request(
            prompt, sampling, config, hints, cancel=cancel, streamed=True
        )
        return self._questions.stream(request)

    def generate_batch(
        self,
        prompts: Sequence[PromptLike],
        sampling: SamplingParams | None = None,
        *,
        config: BlendConfig | None = None,
        hints: Hints = (),
    ) -> list[Generation]:
        """Answer several prompts; all are checked, as generate does, before the first is served.

        Prompts are prefilled in turn, in groups that share chunks, and decoded together. If one
        fails, the others are cancelled. Returns the answers in the prompts' order.

        Args:
            prompts: each as for generate.
            sampling: of all of them.
            config: of all of them.
            hints: chunks, or ids of documents, that any of the prompts is known to hold.
        """
        requests = [self._questions.request(one, sampling, config, hints) for one in prompts]
        return self._questions.generate_batch(requests)

    async def agenerate(
        self,
        prompt: PromptLike,
        sampling: SamplingParams | None = None,
        *,
        config: BlendConfig | None = None,
        hints: Hints = (),
    ) -> Generation:
        """Return the same as generate, off the event loop; cancelling the task stops the work.

        Args:
            prompt: as for generate.
            sampling: as for generate.
            config: as for generate.
            hints: as for generate.
        """
        return await self._questions.agenerate(prompt, sampling, config, hints)

    def astream(
        self,
        prompt: PromptLike,
        sampling: SamplingParams | None = None,
        *,
        config: BlendConfig | None = None,
        hints: Hints = (),
    ) -> AsyncIterator[Delta]:
        """Yield the same as stream, off the event loop; leaving the loop over it stops the work.

        Args:
            prompt: as for generate; errors come at the first step.
            sampling: as for generate.
            config: as for generate.
            hints: as for generate.
        """
        return self._questions.astream(prompt, sampling, config, hints)

    def compare_with_full_prefill(
        self,
        prompt: PromptLike,
        answer: Sequence[int],
        *,
        config: BlendConfig | None = None,
        with_documents: bool = False,
    ) -> Comparison | None:
        """Return how far predictions after the blended prompt are from those after full prefill.

        That is what the guard does in idle time, at once. Divergences are in nats per token; None
        if the engine cannot compare, has no memory for it, or would not blend the prompt, if there
        is no answer, or if the text to compare with does not fit the context window.

        Args:
            prompt: as for generate.
            answer: the tokens along which predictions are compared.
            config: as for generate.
            with_documents: full prefill is that of the prompt with the text of its documents that
                its chunks were computed after, as the guard has it, instead of the prompt as it is.
        """
        if not self.compares or not answer:
            return None
        blend = (config or self.config).with_changes(cost_model=False, trace=False)
        sampling = SamplingParams.greedy(max_tokens=len(answer))
        request = self._questions.request(prompt, sampling, blend, steered=False)
        ids, room = request.prepared.token_ids, self.context_window - len(answer)
        compared: Compared | None = Compared(ids, tuple(answer))
        if with_documents:
            compared = guard.with_documents(request.prepared, answer, self._led, room)
        return None if compared is None else run_to_end(self._compare(request, compared))

    def after_answer(self, hook: AnswerHook) -> None:
        """Call a hook with each request of this engine, and its answer, before its caller gets it.

        Args:
            hook: is called after those added before; may return a changed answer. Its exceptions
                are logged once, and fail no request. A RequestWatcher sees requests begin, too.
        """
        self._parts.after_answer.add(hook)

    def when_idle(self, job: IdleJob) -> bool:
        """Queue work for idle time; returns whether it was accepted.

        Args:
            job: it is refused while many jobs wait, for a while after one of its kind failed, and
                once the engine is closed. Closing ends a running job between two steps.
        """
        return self._parts.idle.add(job)

    # Life

    def sibling(self, *, lead_in: LeadInConfig | str) -> Self:
        """Return an engine with another lead-in around the same model and store.

        It has an empty registry and no hooks, and closes with this one.
        """
        self._lifetime.check()
        younger = copy.copy(self)
        younger._lifetime = Lifetime(self._lifetime)
        younger._settle(self._parts.setup_of_sibling(lead_in, self.config))
        self._family.fingerprint_hook(younger, younger._led.fingerprint)
        return younger

    def close(self) -> None:
        """Cancel running work, and free the engine's resources."""
        if not self._lifetime.end() or self._lifetime.is_forked:
            return  # forked: the parent ends the threads and connections, and frees the memory
        self._parts.idle.close()
        if self._lifetime.elder is None:
            self._family.close_idle_queues()
            self._close()

    # For subclasses

    def _is_idle(self) -> bool:
        """Whether no request is running; called before each step of idle work."""
        return self._family.activity.is_idle

    def _identify(self, identity: Mapping[str, Any]) -> None:
        """Switch to another identity of the model (``model_identity``)."""
        self._family.identity = identity
        self._led.identify(identity)
        self._family.fingerprint_hook(self, self._led.fingerprint)
