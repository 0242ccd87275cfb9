"""The public contract of all engines; a subclass implements Backend."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from types import MethodType
from typing import Any, Self
from weakref import WeakSet, proxy

from cacheblend_rag.blend.steps import run_to_end
from cacheblend_rag.engines.after_answer import AfterAnswer, AnswerHook, FirstMiss
from cacheblend_rag.engines.answering import Answering
from cacheblend_rag.engines.backend import EngineSetup, engine_settings
from cacheblend_rag.engines.filling import Filling, TurnKeeper
from cacheblend_rag.engines.guard import Guard, with_reference
from cacheblend_rag.engines.indexing import Indexing
from cacheblend_rag.engines.lifetime import Activity, IdleQueue, Lifetime
from cacheblend_rag.engines.prepare import PromptLike, PromptPreparer
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.kv.chunk_kv import KVKey
from cacheblend_rag.prefill.comparing import Compared, Comparison
from cacheblend_rag.prefill.lead_in import LeadIn
from cacheblend_rag.report import FillReport, GuardReport
from cacheblend_rag.settings import BlendConfig, GuardConfig, LeadInConfig, check_namespace
from cacheblend_rag.text.chat import FIXED_DAY, on_day
from cacheblend_rag.text.chunk import Chunk
from cacheblend_rag.text.encoder import PromptEncoder
from cacheblend_rag.text.registry import ChunkRegistry


class Engine(Indexing, Answering):
    """A model that answers prompts, and reuses the KV of the chunks in them.

    Safe to share between threads. Indexing has the methods of index time, Answering those of
    question time, and Backend, which a subclass implements, further properties, such as
    ``context_window``, ``blend_refusal``, ``dtype`` and ``read_only``.

    Attributes:
        name, part_chunks: as in Backend.
        model_name, tokenizer, instruction, namespace: as in EngineSetup.
        config, lead_in, registry: as in EngineSetup, with defaults for None.
        encoder: encodes prompts with the tokenizer, and finds chunks in their tokens.
    """

    def __init__(self, setup: EngineSetup) -> None:
        """Create an engine from the settings of its subclass and its user.

        Raises ConfigError when a setting is out of range.
        """
        self._lifetime, self._identity = Lifetime(), setup.identity
        # Siblings, which are copies, share these.
        self._activity, self._idle_queues = Activity(), WeakSet[IdleQueue]()
        self._settle(setup)

    def _settle(self, setup: EngineSetup) -> None:
        """Take the settings for one lead-in and one registry."""
        check_namespace(setup.namespace)
        self.model_name, self.tokenizer = setup.model_name, setup.tokenizer
        self.namespace = setup.namespace
        self.config, self.lead_in = engine_settings(setup.config, setup.lead_in)
        self.registry = ChunkRegistry() if setup.registry is None else setup.registry
        told = setup.instruction
        given = told if isinstance(told, str) else told(self.tokenizer)
        self.instruction = on_day(FIXED_DAY, given, self.tokenizer)
        self.encoder = PromptEncoder(self.tokenizer)
        self._led = LeadIn(
            self.encoder,
            self.lead_in,
            instruction=self.instruction,
            identity=self._identity,
            namespace=self.namespace,
        )
        self._preparer = PromptPreparer(
            self.tokenizer,
            self.encoder,
            self.registry,
            self._led,
            self.context_window,
            MethodType(type(self)._find, proxy(self)),
        )
        self._watch_registry()
        self._add_idle_work(setup)

    def _add_idle_work(self, setup: EngineSetup) -> None:
        """Add what follows answers: filling of what they missed, the guard, a warning."""
        # Weakly: in a circle of references, an engine that its user drops would keep the memory of
        # its model until the next garbage collection. A running call keeps the engine alive.
        me: Any = proxy(self)
        self._hooks, self._idle = AfterAnswer(), IdleQueue(me)
        self._idle_queues.add(self._idle)
        self._guard = Guard(me, self._led, self._idle)
        self._guard.use(setup.guard, self.config.ratio)
        self._filling = Filling(me, self._idle)
        self._filling.is_on = setup.fill_on_miss
        self._hooks.add(self._filling.see)
        self._hooks.add(TurnKeeper(me, self.encoder, self._activity, self._idle).see)
        # After filling: a prompt whose misses are being filled is no reason to warn.
        self._hooks.add(FirstMiss(self.registry).see)
        self._hooks.add(self._guard.see)

    # Facts

    @property
    def fingerprint(self) -> str:
        """Hash of model, tokenizer, lead-in and namespace; every key of stored KV contains it."""
        return self._led.fingerprint

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
        return self._filling.is_on

    @fill_on_miss.setter
    def fill_on_miss(self, is_on: bool) -> None:
        self._filling.is_on = is_on

    @property
    def guard(self) -> GuardConfig | None:
        """How the quality of blended answers is watched, or None; setting it begins anew."""
        return self._guard.config

    @guard.setter
    def guard(self, config: GuardConfig | None) -> None:
        self._guard.use(config, self.config.ratio)

    def tokenize(self, text: str) -> tuple[int, ...]:
        """Return the tokens of ``text`` as a chunk, without special tokens."""
        return self.encoder.chunk(text)

    def key(self, chunk: Chunk) -> KVKey:
        """Return the key of a chunk's KV."""
        return self._led.key(chunk)

    # Quality, and what follows answers

    def fill_report(self) -> FillReport:
        """Return the counts of filling missed chunks so far (``fill_on_miss``)."""
        return self._filling.report()

    def guard_report(self) -> GuardReport:
        """Return the guard's state, and its counts so far (``guard``)."""
        return self._guard.report()

    def reset_guard(self) -> None:
        """Let the guard begin anew: the ratio is not raised, and blending goes on."""
        self.guard = self._guard.config

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
        if the engine has no memory for it, or would not blend the prompt, if there is no answer, or
        if the text to compare with does not fit the context window.

        Args:
            prompt: as for generate.
            answer: the tokens along which predictions are compared.
            config: as for generate.
            with_documents: full prefill is that of the prompt with the text of its documents that
                its chunks were computed after, as the guard has it, instead of the prompt as it is.
        """
        if not answer:
            return None
        blend = (config or self.config).with_changes(cost_model=False, trace=False)
        sampling = SamplingParams.greedy(max_tokens=len(answer))
        request = self._request(prompt, sampling, blend, steered=False)
        ids, room = request.prepared.token_ids, self.context_window - len(answer)
        compared: Compared | None = Compared(ids, tuple(answer))
        if with_documents:
            compared = with_reference(request.prepared, answer, self._led, room)
        return None if compared is None else run_to_end(self._compare(request, compared))

    def after_answer(self, hook: AnswerHook) -> None:
        """Call a hook with each request of this engine, and its answer, before its caller gets it.

        Args:
            hook: is called after those added before; may return a changed answer. Its exceptions
                are logged once, and fail no request. A RequestWatcher sees requests begin, too.
        """
        self._hooks.add(hook)

    # Life

    def sibling(self, *, lead_in: LeadInConfig | str) -> Self:
        """Return an engine with another lead-in around the same model and store.

        It has an empty registry and no hooks, and closes with this one.
        """
        self._lifetime.check()
        younger = copy.copy(self)
        younger._lifetime = Lifetime(self._lifetime)
        setup = EngineSetup(
            model_name=self.model_name,
            tokenizer=self.tokenizer,
            identity=self._identity,
            config=self.config,
            lead_in=LeadInConfig.of(lead_in),
            instruction=self.instruction,
            namespace=self.namespace,
            fill_on_miss=self.fill_on_miss,
            guard=self.guard,
        )
        younger._settle(setup)
        return younger

    def close(self) -> None:
        """Cancel running work, and free the engine's resources."""
        if not self._lifetime.end() or self._lifetime.is_forked:
            return  # forked: the parent ends the threads and connections, and frees the memory
        self._idle.close()
        if self._lifetime.elder is None:
            for queue in list(self._idle_queues):
                queue.close()
            self._close()

    # For subclasses

    def _is_idle(self) -> bool:
        """Whether no request is running; called before each step of idle work."""
        return self._activity.is_idle
