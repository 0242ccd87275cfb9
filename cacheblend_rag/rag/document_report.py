"""The answers and the report of a long document's analysis, and the file that keeps answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from cacheblend_rag.result_log import ResultLog

if TYPE_CHECKING:
    from cacheblend_rag.engines.answer import Generation

Combine = Literal["map_reduce", "refine"]
"""How the windows' answers are combined into one."""


@dataclass(frozen=True)
class PromptAnswer:
    """The answer to one prompt of an analysis.

    Args:
        text: the answer, without white space around it.
        finish_reason: as in Generation.
        prompt_tokens, reused_tokens, recomputed_tokens, compute_share: as in BlendReport.
        ttft_seconds: time to first token.
    """

    text: str
    finish_reason: str
    prompt_tokens: int
    reused_tokens: int
    recomputed_tokens: int
    compute_share: float
    ttft_seconds: float

    @classmethod
    def of(cls, generation: Generation) -> PromptAnswer:
        """Return what is kept of a generation."""
        report = generation.report
        return cls(
            generation.text.strip(),
            generation.finish_reason,
            report.prompt_tokens,
            report.reused_tokens,
            report.recomputed_tokens,
            report.compute_share,
            report.seconds.time_to_first_token,
        )


class AnswerLog(ResultLog[PromptAnswer]):
    """The answers to an analysis' prompts, those that combine answers included."""

    work = "analysis"

    @staticmethod
    def to_plain(result: PromptAnswer) -> dict[str, Any]:
        """Return an answer as plain JSON values."""
        return asdict(result)

    @staticmethod
    def from_plain(plain: Mapping[str, Any]) -> PromptAnswer:
        """Return the answer that ``to_plain`` made these values of."""
        return PromptAnswer(**plain)


@dataclass(frozen=True)
class WindowAnswer:
    """The answer from one window of a long document.

    Args:
        window: the window's index, from 0.
        first_chunk, end_chunk: it holds the document's chunks [first_chunk, end_chunk).
        start, end: they are characters [start, end) of the document.
        answer: the answer. With ``refine`` it holds what earlier windows said, too.
        is_resumed: whether an earlier run gave it, and the engine was not asked.
    """

    window: int
    first_chunk: int
    end_chunk: int
    start: int
    end: int
    answer: PromptAnswer
    is_resumed: bool = False

    @property
    def text(self) -> str:
        """The answer's text."""
        return self.answer.text

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        plain = asdict(self)
        answer = plain.pop("answer")
        return {**plain, **answer}


@dataclass(frozen=True)
class LongDocumentReport:
    """The plan of an analysis, and its results so far.

    Args:
        question: what each window was asked.
        document_id: the document of its chunks in the engine's registry.
        collection: their collection there.
        characters: length of the document.
        tokens: length of the document, as the sum of its pieces.
        chunks: how many chunks it was cut into.
        chunk_tokens: the most tokens of a chunk.
        overlap: the most tokens that a chunk repeats of the one before it.
        asked_window: chunks in a window, as asked for.
        window: chunks in a window, as the model and the document allow.
        window_reason: why these are fewer; None if they are not.
        windows: how many windows there are.
        combine: how answers are combined.
        computed_chunks: chunks whose KV was computed and stored.
        computed_tokens: their tokens.
        stored_chunks: chunks whose KV was stored already.
        refused: how many chunks were not stored, by reason; windows compute them.
        prompts: prompts that the engine answered.
        resumed_prompts: prompts whose answers an earlier run gave.
        prompt_tokens, reused_tokens, recomputed_tokens: sums over the prompts that the engine
            answered.
        answer: the combined answer; "" until it is known.
        is_cancelled: whether it was cancelled before.
        seconds: since it was begun.
    """

    question: str
    document_id: str
    collection: str
    characters: int
    tokens: int
    chunks: int
    chunk_tokens: int
    overlap: int
    asked_window: int
    window: int
    window_reason: str | None
    windows: int
    combine: Combine
    computed_chunks: int = 0
    computed_tokens: int = 0
    stored_chunks: int = 0
    refused: Mapping[str, int] = field(default_factory=dict)
    prompts: int = 0
    resumed_prompts: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    recomputed_tokens: int = 0
    answer: str = ""
    is_cancelled: bool = False
    seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)
