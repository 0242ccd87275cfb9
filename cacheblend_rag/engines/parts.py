"""The arguments of an engine, and the objects that its public methods call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakSet, proxy

from cacheblend_rag.engines.after_answer import AfterAnswer
from cacheblend_rag.engines.backend import Backend, engine_settings
from cacheblend_rag.engines.filling import Filling
from cacheblend_rag.engines.first_miss import FirstMiss
from cacheblend_rag.engines.guard import Guard
from cacheblend_rag.engines.idle import Activity, IdleQueue
from cacheblend_rag.engines.index_time import IndexTime
from cacheblend_rag.engines.lifetime import Lifetime
from cacheblend_rag.engines.prepare import PromptPreparer
from cacheblend_rag.engines.question_time import QuestionTime
from cacheblend_rag.prefill.lead_in import LeadIn
from cacheblend_rag.settings import BlendConfig, GuardConfig, LeadInConfig, check_namespace
from cacheblend_rag.text.chat import FIXED_DAY, on_day
from cacheblend_rag.text.encoder import PromptEncoder, Tokenizer
from cacheblend_rag.text.registry import ChunkRegistry


@dataclass(frozen=True, kw_only=True)
class EngineSetup:
    """The arguments of an engine; None is a setting's default.

    Args:
        model_name: the model's hub name, or its folder's own name.
        tokenizer: the model's.
        identity: everything that the model's KV depends on, the lead-in aside (``model_identity``).
        config: the default for requests without one.
        lead_in: the text that chunks are computed after, as settings or by its kind's name.
        registry: known chunks; several engines may share one.
        instruction: the text of prompts before their first chunk, or a function that gets the
            tokenizer and returns it.
        namespace: tenants with different namespaces never share KV.
        fill_on_miss: whether registered chunks whose KV a request missed are computed and stored in
            the engine's idle time, as if by ``precompute``.
        guard: how the quality of blended answers is watched; None is not at all.
    """

    model_name: str
    tokenizer: Any
    identity: Mapping[str, Any]
    config: BlendConfig | None = None
    lead_in: LeadInConfig | str | None = None
    registry: ChunkRegistry | None = None
    instruction: str | Callable[[Tokenizer], str] = ""
    namespace: str = "default"
    fill_on_miss: bool = False
    guard: GuardConfig | None = None


def _unheard(engine: Backend, fingerprint: str) -> None: ...


@dataclass
class Family:
    """What an engine and its siblings have in common.

    identity: of their model. activity: counts the running requests of all of them. idle_queues: of
    all of them, held weakly. fingerprint_hook: called with each of them and its fingerprint
    whenever that changes.
    """

    identity: Mapping[str, Any]
    activity: Activity = field(default_factory=Activity)
    idle_queues: WeakSet[IdleQueue] = field(default_factory=WeakSet)
    fingerprint_hook: Callable[[Any, str], None] = _unheard

    def close_idle_queues(self) -> None:
        """End the idle work of all of them."""
        for queue in list(self.idle_queues):
            queue.close()


class EngineParts:
    """The objects that an engine's methods call, for one lead-in and one registry.

    engine: the backend of all parts. lifetime, family: of that engine. Raises ConfigError when a
    setting is out of range.
    """

    def __init__(
        self, engine: Backend, setup: EngineSetup, lifetime: Lifetime, family: Family
    ) -> None:
        check_namespace(setup.namespace)
        self._setup = setup
        self.config, self.lead_in = engine_settings(setup.config, setup.lead_in)
        self.registry = ChunkRegistry() if setup.registry is None else setup.registry
        tokenizer, told = setup.tokenizer, setup.instruction
        given = told if isinstance(told, str) else told(tokenizer)
        self.instruction = on_day(FIXED_DAY, given, tokenizer)
        splits = self.lead_in.split_special_tokens
        self.encoder = PromptEncoder(tokenizer, split_special_tokens=splits)
        self.led = LeadIn(
            self.encoder,
            self.lead_in,
            instruction=self.instruction,
            identity=family.identity,
            namespace=setup.namespace,
        )
        preparer = PromptPreparer(
            tokenizer, self.encoder, self.registry, self.led, engine.context_window
        )
        # Weakly: in a circle of references, an engine that its user drops would keep the memory of
        # its model until the next garbage collection. A running call keeps the engine alive.
        backend: Any = proxy(engine)
        self.after_answer, self.idle = AfterAnswer(), IdleQueue(backend)
        family.idle_queues.add(self.idle)
        self.index_time = IndexTime(backend, lifetime, self.registry, self.led)
        self.guard = Guard(backend, self.led, self.idle)
        self.guard.use(setup.guard, self.config.ratio)
        self.question_time = QuestionTime(
            backend, lifetime, preparer, self.after_answer, family.activity, self.guard
        )
        self.filling = Filling(self.index_time, self.idle)
        self.filling.is_on = setup.fill_on_miss
        self.after_answer.add(self.filling.see)
        # After filling: a prompt whose misses are being filled is no reason to warn.
        self.after_answer.add(FirstMiss(self.registry).see)
        self.after_answer.add(self.guard.see)

    def setup_of_sibling(self, lead_in: LeadInConfig | str, config: BlendConfig) -> EngineSetup:
        """Return the setup of the same engine with another lead-in and an empty registry."""
        return replace(
            self._setup,
            config=config,
            lead_in=LeadInConfig.of(lead_in),
            registry=None,
            instruction=self.instruction,
            fill_on_miss=self.filling.is_on,
            guard=self.guard.config,
        )
