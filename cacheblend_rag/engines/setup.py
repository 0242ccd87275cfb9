"""The arguments of an engine, and what it has in common with its siblings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

from cacheblend_rag.engines.idle import Activity, IdleQueue
from cacheblend_rag.settings import BlendConfig, GuardConfig, LeadInConfig
from cacheblend_rag.text.encoder import Tokenizer
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
    fingerprint_hook: Callable[[Any, str], None] = lambda _engine, _fingerprint: None

    def close_idle_queues(self) -> None:
        """End the idle work of all of them."""
        for queue in list(self.idle_queues):
            queue.close()
