"""The answers of a long document's analysis: asked for, kept in a file, and reported."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from threading import Event
from typing import TYPE_CHECKING, Any, Literal

from cacheblend_rag.errors import PromptTooLongError
from cacheblend_rag.rag.prompt import ANSWER_SHARE
from cacheblend_rag.result_log import ResultLog
from cacheblend_rag.text.chat import InstructedChat, begins_as_rendered, on_day
from cacheblend_rag.text.chunk import SEPARATOR, Chunk
from cacheblend_rag.text.prompt import BlendPrompt

if TYPE_CHECKING:
    from cacheblend_rag.engines.answer import Generation
    from cacheblend_rag.engines.base import Engine
    from cacheblend_rag.engines.sampling import SamplingParams
    from cacheblend_rag.settings import BlendConfig

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

    work, kind = "analysis", PromptAnswer


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


class PromptAsker:
    """Answers prompts about one document by one engine.

    sampling, config: of all prompts. log: answers that are known already are taken from it, and
    new ones are kept in it. cancel: stops the work. document: its text, on which the KV of chunks
    depends, too. document_hash: 32 hex digits of its SHA-256. answer_tokens: maximum tokens of an
    answer, also where a later prompt contains it.
    """

    def __init__(
        self,
        engine: Engine,
        sampling: SamplingParams,
        *,
        config: BlendConfig | None,
        log: AnswerLog,
        cancel: Event | None,
        document: str,
    ) -> None:
        self.answer_tokens = min(sampling.max_tokens, engine.context_window // ANSWER_SHARE)
        self._sampling = sampling.with_changes(max_tokens=self.answer_tokens)
        self._engine, self._config = engine, config
        self._log, self._cancel = log, cancel or Event()
        self.document_hash = hashlib.sha256(document.encode("utf-8", "replace")).hexdigest()[:32]

    @property
    def is_cancelled(self) -> bool:
        """Whether cancellation was requested."""
        return self._cancel.is_set()

    def room(self, frame: BlendPrompt) -> int:
        """Return how many tokens a prompt may hold beside ``frame`` and its answer.

        Raises PromptTooLongError when there are none.
        """
        try:
            tokens = len(self._engine.prepare(frame).token_ids)
        except PromptTooLongError as error:
            tokens = error.tokens
        window, answer_tokens = self._engine.context_window, self.answer_tokens
        if tokens >= window - answer_tokens:
            raise PromptTooLongError(tokens, window, answer_tokens=answer_tokens)
        return window - answer_tokens - tokens

    def within(self, answer: str) -> str:
        """Truncate an answer to ``answer_tokens`` tokens.

        Tokenizing generated text may give more tokens than were generated.
        """
        while (tokens := len(self._engine.tokenize(answer))) > self.answer_tokens:
            answer = answer[: len(answer) * self.answer_tokens // tokens]
        return answer

    def known(self, prompt: BlendPrompt) -> PromptAnswer | None:
        """Return the answer that the log holds, or None."""
        return self._log.get(self._key(prompt))

    def ask(self, prompt: BlendPrompt) -> PromptAnswer | None:
        """Generate an answer and log it; None if cancelled."""
        if self.is_cancelled:
            return None
        generation = self._engine.generate(
            prompt, self._sampling, config=self._config, cancel=self._cancel
        )
        if generation.finish_reason == "cancelled":
            return None
        answer = PromptAnswer.of(generation)
        self._log.put(self._key(prompt), answer)
        return answer

    def _key(self, prompt: BlendPrompt) -> Mapping[str, Any]:
        """Return what an answer depends on."""
        config = self._config or self._engine.config
        return {
            "document": self.document_hash,
            "prompt": hashlib.sha256(prompt.text.encode()).hexdigest()[:32],
            "model": self._engine.model_name,
            "dtype": self._engine.dtype,
            "kv": self._engine.fingerprint,
            "config": config.model_dump(mode="json"),
            "sampling": self._sampling.to_dict(),
        }


INSTRUCTION = (
    "The passages below are consecutive parts of one long document; each may begin with the end of "
    "the one before it. Answer from them alone. If they do not hold the answer, say so."
)
SUMMARY = "What is the main content of this text?"
"""The question if none is given."""
COMBINE = (
    "The parts above answer the question below, each from another section of one document, in its "
    "order. Join them to one answer. Leave out what they repeat, and parts without an answer."
)
REFINE = (
    "This is the answer from the sections of the document before these passages:\n{answer}\n\n"
    "Write the answer anew, with what the passages above add or correct."
)


def default_lead_in(tokenizer: Any) -> str:
    """Return the text before the first passage, the ``instruction`` of an engine for analyses."""
    return InstructedChat(tokenizer, INSTRUCTION).lead_in


def heading(number: int) -> str:
    """Return the heading of an answer in the prompt that joins several: "Part 3: "."""
    return f"Part {number}: "


@dataclass(frozen=True)
class WindowPrompts:
    """Prompts for one engine and one question.

    before: the text before the first passage. behind: the text after the question. is_rendered:
    whether a chat template gave them.
    """

    question: str
    before: str
    behind: str
    is_rendered: bool

    @classmethod
    def of(cls, question: str, tokenizer: Any, instruction: str) -> WindowPrompts:
        """Return prompts that begin with an engine's instruction, if it has one."""
        if instruction and not begins_as_rendered(instruction, tokenizer):
            return cls(question, instruction, "", False)
        chat = InstructedChat(tokenizer, "" if instruction else INSTRUCTION)
        before = on_day(None, instruction or chat.lead_in, tokenizer)
        return cls(question, before, chat.closing, chat.has_template)

    @property
    def stop(self) -> tuple[str, ...]:
        """Strings that end an answer: a model without a template would go on with a question."""
        return () if self.is_rendered else (f"{SEPARATOR}Question:",)

    def window(self, chunks: Sequence[Chunk], so_far: str = "") -> BlendPrompt:
        """Return the prompt of a window; ``so_far``: the answer to refine, if there is one."""
        passages = [part for chunk in chunks for part in (chunk, SEPARATOR)]
        return self._prompt(*passages, REFINE.format(answer=so_far) if so_far else "")

    def combining(self, answers: Sequence[str]) -> BlendPrompt:
        """Return the prompt that joins answers to one."""
        parts = [f"{heading(number)}{text}" for number, text in enumerate(answers, start=1)]
        return self._prompt(SEPARATOR.join([*parts, COMBINE]))

    def _prompt(self, *parts: str | Chunk) -> BlendPrompt:
        *first, last = parts
        asked = f"{last}{SEPARATOR if last else ''}Question: {self.question}\nAnswer:{self.behind}"
        return replace(BlendPrompt.of(self.before, *first, asked), is_rendered=self.is_rendered)
