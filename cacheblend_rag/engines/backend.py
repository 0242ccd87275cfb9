"""The part of an engine that its subclass implements, for PyTorch, vLLM or anything else.

A backend describes itself, begins to answer requests, and operates on its KV store. The methods
that users call (``base.py``) are built on it, the same for every engine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from cacheblend_rag.blend.selectors import make_selector
from cacheblend_rag.engines.answer import Delta, Request
from cacheblend_rag.engines.prepare import PreparedPrompt
from cacheblend_rag.engines.sampling import ResolvedSampling
from cacheblend_rag.engines.stream import Stream
from cacheblend_rag.errors import ConfigError, StoreError
from cacheblend_rag.kv.chunk_kv import KVKey
from cacheblend_rag.kv.stored_chunk import READ_ONLY
from cacheblend_rag.prefill.comparing import Compared, Comparison
from cacheblend_rag.prefill.lead_in import ChunkPlan, PlacedChunk
from cacheblend_rag.reason import Miss, Reason
from cacheblend_rag.report import Evicted, PrecomputeReport
from cacheblend_rag.settings import BlendConfig, GuardConfig, LeadInConfig
from cacheblend_rag.text.encoder import Tokenizer
from cacheblend_rag.text.registry import ChunkRegistry


def checked_config(config: BlendConfig) -> BlendConfig:
    """Return a request's config; its fields' ranges were checked when it was made.

    Raises ConfigError for an unknown selector or an unknown option of one.
    """
    make_selector(config.selector, config.selector_options)
    return config


def engine_settings(
    config: BlendConfig | None, lead_in: LeadInConfig | str | None
) -> tuple[BlendConfig, LeadInConfig]:
    """Return an engine's config and lead-in, defaults for None; raises ConfigError."""
    return checked_config(BlendConfig.of(config)), LeadInConfig.of(lead_in)


class Backend(ABC):
    """Facts, requests, and the operations of a KV store.

    Attributes:
        name: the kind of engine, as reports name it.
        part_chunks: least number of chunks to store in one part.
        fills_last: whether ``_fill`` and ``_compare`` are carried out by somebody who does them
            last, so that their steps need not wait for idle time.
        config: the default for requests without one.
    """

    name: str
    part_chunks: ClassVar[int] = 64
    fills_last: ClassVar[bool] = False
    config: BlendConfig

    # Facts

    @property
    @abstractmethod
    def context_window(self) -> int:
        """Most tokens a prompt and its answer may hold together."""

    @property
    @abstractmethod
    def blend_refusal(self) -> Reason | None:
        """Why every request is served by ordinary prefill, None if the model can be blended."""

    @property
    def model_sampling(self) -> ResolvedSampling:
        """The model's own sampling settings, used for fields of a request that are None."""
        return ResolvedSampling.of_model({})

    @property
    def address(self) -> str:
        """The argument of ``open_engine`` for such an engine: a name, or a server's URL."""
        return self.name

    @property
    def dtype(self) -> str | None:
        """Precision of the model's weights, None if unknown."""
        return None

    @property
    def read_only(self) -> bool:
        """Whether its store is read-only: missing chunks are computed again with each prompt."""
        return False

    @property
    def _longest_run(self) -> int:
        """Most tokens of a lead-in, a context and a chunk together."""
        return self.context_window

    @property
    def _token_bytes(self) -> int:
        """Bytes of one token's KV; 0 if unknown."""
        return 0

    # Requests

    def _check_config(self, config: BlendConfig) -> None:  # noqa: B027 - most configs suit
        """Raise ConfigError when a request's config does not suit the model."""

    def _check_sampling(self, sampling: ResolvedSampling) -> None:
        """Raise ConfigError when answers cannot be sampled so, before any work is done."""
        if sampling.structured_outputs is not None:
            raise ConfigError(f"a {self.name} engine has no structured_outputs: leave it out")

    @abstractmethod
    def _start(self, request: Request) -> Stream[Delta]:
        """Begin to answer; the stream's last item holds the Generation."""

    keeps_turns: ClassVar[bool] = False
    """Whether it finds what it has stored of conversations' turns."""

    def _find(self, prompt: PreparedPrompt) -> Sequence[PlacedChunk]:
        """Return the stored chunks of a prompt that are not among its ``placed`` ones, in order."""
        return ()

    @abstractmethod
    def _compare(
        self, request: Request, compared: Compared
    ) -> Generator[None, None, Comparison | None]:
        """Compare a blended prompt with full prefill; returns None if it can no longer be blended.

        Each step is begun in idle time, in a thread of its own; if ``fills_last``, at any time.
        Closing the engine waits for the end of a step.
        """

    # The store

    @abstractmethod
    def _store(self, plans: Sequence[ChunkPlan]) -> Generator[PrecomputeReport]:
        """Compute and store the KV of those chunks that are not stored, a few at a time.

        plans: distinct chunks, whole documents in order. Closing the generator stops the work.
        """

    def _fill(
        self, plans: Sequence[ChunkPlan], conversation: str = ""
    ) -> Generator[PrecomputeReport]:
        """As ``_store``, in short steps that are begun as those of ``_compare``.

        conversation: the key of the one whose turns the chunks are of, or "".
        """
        yield from self._store(plans)

    @abstractmethod
    def _verify(self, keys: Sequence[KVKey]) -> Mapping[KVKey, Reason]:
        """Check the stored KV of keys, and quarantine damaged KV.

        Returns the keys whose KV stays stored although it cannot be read, with the reason.
        """

    @abstractmethod
    def _prefetch(self, keys: Sequence[KVKey]) -> None:
        """Start loading KV into the fastest tier."""

    @abstractmethod
    def _evict(self, keys: Sequence[KVKey]) -> Evicted:
        """Drop the KV of keys; returns how many were stored."""

    def stored(self, keys: Sequence[KVKey]) -> Sequence[bool | None]:
        """Return for each key whether its KV is stored; None while a tier fails that may hold it.

        By default, looks among all stored keys.

        Raises:
            ConfigError: when the engine cannot tell.
        """
        there = set(self._stored_keys())
        return [key in there for key in keys]

    def stored_chunks(self) -> int | None:
        """Return how many chunks are stored, this engine's at least; None if it cannot tell."""
        try:
            return len({(key.chunk_id, key.context_id) for key in self._stored_keys()})
        except (ConfigError, StoreError):
            return None

    def _forget(self, keys: Sequence[KVKey]) -> None:
        """Drop KV in memory that another writer has evicted from a shared store."""
        self._evict(keys)

    def _evict_turns(self, keys: Sequence[KVKey], conversation: str) -> int:
        """Drop the KV of a conversation's turns; returns for how many keys KV was stored.

        conversation: its key.
        """
        return int(self._evict(keys))

    @abstractmethod
    def _release(self) -> int:
        """Free the memory of KV, keep KV stored elsewhere; returns the freed bytes."""

    def _stored_keys(self) -> Iterable[KVKey]:
        """Return the keys of all KV that is stored under this engine's fingerprint."""
        raise ConfigError(f"a {self.name} engine cannot list its stored chunks")

    def _storing_refusal(self) -> Reason | None:
        """Return why no chunk's KV can be stored now, or None."""
        if self.read_only:
            return READ_ONLY
        refusal = self.blend_refusal
        return None if refusal is None else Reason(refusal.code, Miss.UNSUPPORTED_MODEL)

    @abstractmethod
    def _close(self) -> None:
        """Free the resources of this engine and its siblings; called once."""


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
