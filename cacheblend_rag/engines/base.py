"""The contract every engine keeps: what goes in, what comes out, the report of what was reused."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from threading import Event
from typing import Literal, Protocol

from cacheblend_rag.config import BlendConfig
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.report import BlendReport, PrecomputeReport
from cacheblend_rag.text.chat import Message
from cacheblend_rag.text.chunk import Chunk, Document
from cacheblend_rag.text.prompt import BlendPrompt
from cacheblend_rag.text.registry import ChunkRegistry

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn.

    max_tokens: at most so many new tokens. temperature: 0 is greedy. top_p: (0, 1]. top_k: 0 is
    off. repetition_penalty: 1 is off. seed: None draws one. stop: strings that end the answer and
    are cut from it. ignore_eos: go on past the end-of-sequence token (benchmarks).
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop or ()
        if not isinstance(stop, Sequence) or not all(isinstance(s, str) and s for s in stop):
            raise ConfigError(f"stop={self.stop!r:.100} must hold non-empty strings")
        object.__setattr__(self, "stop", tuple(stop))
        for name in ("max_tokens", "top_k"):
            _check_number(name, getattr(self, name), whole=True)
        for name in ("temperature", "top_p", "repetition_penalty"):
            _check_number(name, getattr(self, name))
        if self.seed is not None:
            _check_number("seed", self.seed, whole=True)
        if self.max_tokens < 1:
            raise ConfigError(f"max_tokens={self.max_tokens!r} must be at least 1")
        if self.temperature < 0:
            raise ConfigError(f"temperature={self.temperature!r} must be at least 0")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p={self.top_p!r} must be above 0 and at most 1")
        if self.top_k < 0:
            raise ConfigError(f"top_k={self.top_k!r} must be at least 0")
        if self.repetition_penalty <= 0:
            raise ConfigError(f"repetition_penalty={self.repetition_penalty!r} must be above 0")


def _check_number(name: str, value: object, *, whole: bool = False) -> None:
    """Raise ConfigError unless a value is a finite number."""
    kinds = int if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not math.isfinite(value):
        kind = "a whole number" if whole else "a number"
        raise ConfigError(f"{name}={value!r:.100} must be {kind}")


@dataclass(frozen=True)
class Generation:
    """One finished answer: ``text`` without stop string, ``token_ids`` without end token."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    prompt_tokens: int
    report: BlendReport


@dataclass(frozen=True)
class Delta:
    """One step of a stream: new text (may be empty); the last one carries the whole Generation."""

    text: str
    generation: Generation | None = None


CLOSED = "the engine is closed: open another"
FULL_PREFILL = "full prefill was asked for"

PromptLike = str | BlendPrompt | Sequence[Message]
"""A prompt text, ready segments, or chat messages (rendered by the model's chat template)."""


class Engine(Protocol):
    """What the frameworks' classes, the command line and the workflows rely on."""

    name: str
    model_name: str
    config: BlendConfig
    registry: ChunkRegistry
    instruction: str

    @property
    def context_window(self) -> int:
        """Most tokens a prompt and its answer may hold together."""

    @property
    def fingerprint(self) -> str:
        """What chunk KV is stored under: model, dtype, tokenizer, lead-in, namespace."""

    @property
    def has_chat_template(self) -> bool:
        """Whether prompts may be chat messages."""

    def tokenize(self, text: str) -> tuple[int, ...]:
        """Return the tokens of ``text`` as a chunk: what looks like a special token is text."""

    def precompute(
        self, items: Iterable[Chunk | Document | str], *, progress: bool = True
    ) -> PrecomputeReport:
        """Register chunks and store their KV; what is stored already is skipped.

        A Document replaces what was known of its document_id in its collection before this call;
        several Documents with one document_id in a call are variants of it and stand side by side.
        """

    def register(self, items: Iterable[Chunk | Document | str]) -> None:
        """Make chunks known without computing anything (after a restart, say)."""

    def prefetch(self, hints: Iterable[Chunk | str]) -> None:
        """Start loading these chunks' KV into the fastest tier; returns at once."""

    def evict_document(self, document_id: str, collection: str | None = None) -> int:
        """Forget a document's chunks and drop their KV; returns how many were dropped.

        collection: only what was cut for it; None is all.
        """

    def generate(
        self,
        prompt: PromptLike,
        sampling: SamplingParams | None = None,
        *,
        config: BlendConfig | None = None,
        hints: Sequence[Chunk | str] = (),
        cancel: Event | None = None,
    ) -> Generation:
        """Answer one prompt."""

    def stream(
        self,
        prompt: PromptLike,
        sampling: SamplingParams | None = None,
        *,
        config: BlendConfig | None = None,
        hints: Sequence[Chunk | str] = (),
        cancel: Event | None = None,
    ) -> Iterator[Delta]:
        """Answer one prompt piece by piece; closing the iterator stops the work."""

    def generate_batch(
        self,
        prompts: Sequence[PromptLike],
        sampling: SamplingParams | None = None,
        *,
        config: BlendConfig | None = None,
        hints: Sequence[Chunk | str] = (),
    ) -> list[Generation]:
        """Answer several prompts, in order."""

    def generate_full(
        self,
        prompt: PromptLike,
        sampling: SamplingParams | None = None,
        *,
        hints: Sequence[Chunk | str] = (),
    ) -> Generation:
        """Answer by ordinary prefill of the same tokens: the baseline to compare with."""

    async def agenerate(
        self,
        prompt: PromptLike,
        sampling: SamplingParams | None = None,
        *,
        config: BlendConfig | None = None,
        hints: Sequence[Chunk | str] = (),
    ) -> Generation:
        """As generate, off the event loop; cancelling the task stops the work."""

    def astream(
        self,
        prompt: PromptLike,
        sampling: SamplingParams | None = None,
        *,
        config: BlendConfig | None = None,
        hints: Sequence[Chunk | str] = (),
    ) -> AsyncIterator[Delta]:
        """As stream, off the event loop."""

    def close(self) -> None:
        """Free what the engine holds."""
