"""Answers a question from a document that is longer than the model's context.

The document is cut into overlapping chunks, whose KV is computed once. A window of several chunks
slides over them, by one chunk each time, and the question is answered from each window: each chunk
is in up to ``window`` prompts, which reuse its KV. The answers are then combined.
"""

from __future__ import annotations

import hashlib
import time
from collections import Counter
from collections.abc import Generator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any, Self

from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.errors import ConfigError, PromptError, PromptTooLongError
from cacheblend_rag.progress import ProgressCallbacks, Task
from cacheblend_rag.rag.document_windows import AnalysisPlan, cut_document
from cacheblend_rag.rag.prompt import ANSWER_SHARE
from cacheblend_rag.result_log import ResultLog
from cacheblend_rag.text.chat import InstructedChat, begins_as_rendered, on_day
from cacheblend_rag.text.chunk import SEPARATOR, Chunk
from cacheblend_rag.text.encoder import EDGE_TOKENS
from cacheblend_rag.text.prompt import BlendPrompt

if TYPE_CHECKING:
    from cacheblend_rag.engines.answer import Generation
    from cacheblend_rag.engines.base import Engine
    from cacheblend_rag.settings import BlendConfig

COLLECTION = "long document"
OPENING_TOKENS = 8
"""Upper bound for BOS, and for tokens that an instruction gains by being tokenized with a chunk."""
INSTRUCTION = (
    "The passages below are consecutive parts of one long document; each may begin with the end of "
    "the one before it. Answer from them alone. If they do not hold the answer, say so."
)
SUMMARY = "What is the main content of this text?"
"""The default question."""
COMBINE = (
    "The parts above answer the question below, each from another section of one document, in its "
    "order. Join them to one answer. Leave out what they repeat, and parts without an answer."
)
REFINE = (
    "This is the answer from the sections of the document before these passages:\n{answer}\n\n"
    "Write the answer anew, with what the passages above add or correct."
)


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
        return {**plain, **plain.pop("answer")}


@dataclass(frozen=True)
class LongDocumentReport:
    """The plan of an analysis, and its results so far.

    Args:
        question: what each window was asked.
        document_id, collection: of its chunks in the engine's registry.
        tokens: length of the document, as the sum of its pieces.
        chunks, windows: how many chunks and windows there are.
        window: chunks in a window; fewer than asked for if the model's context or the document
            holds fewer.
        computed_chunks, computed_tokens: chunks whose KV was computed and stored.
        stored_chunks: chunks whose KV was stored already.
        refused: how many chunks were not stored, by reason; windows compute them.
        prompts, resumed_prompts: prompts that the engine answered, or an earlier run.
        prompt_tokens, reused_tokens, recomputed_tokens: sums over those that the engine answered.
        answer: the combined answer; "" until it is known.
        is_cancelled: whether it was cancelled before.
        seconds: since it was begun.
    """

    question: str
    document_id: str
    collection: str
    tokens: int
    chunks: int
    window: int
    windows: int
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


def default_lead_in(tokenizer: Any) -> str:
    """Return the text before the first passage, the ``instruction`` of an engine for analyses."""
    return InstructedChat(tokenizer, INSTRUCTION).lead_in


class LongDocumentAnalysis:
    """Answers a question from a document of any length, window by window, and combines the answers.

    It is an iterator over the windows' answers, in order; nothing is computed before the first one
    is asked for. The KV of each chunk is computed once, when the first window that holds it is
    asked, and stays in the engine's store; with a ``kv_path`` there, memory does not grow with the
    document. An engine opened with an ``instruction`` has its prompts begin with it. Not to be
    shared between threads.

    Attributes:
        report: the plan and the results so far.
    """

    def __init__(
        self,
        engine: Engine,
        document: str,
        question: str = SUMMARY,
        *,
        sampling: SamplingParams | None = None,
        config: BlendConfig | None = None,
        document_id: str | None = None,
        resume: str | Path | None = None,
        progress: ProgressCallbacks | None = None,
        cancel: Event | None = None,
        **plan: Any,
    ) -> None:
        """Cut the document, and plan its windows.

        Args:
            engine: answers the prompts; any engine, with any lead-in. With ``document``, the
                default, a chunk's KV is computed after the text before it, up to ``chunk_tokens``
                or ``document_window`` tokens, whichever is less.
            document: the text.
            question: asked of each window; by default, for a summary.
            sampling: of all answers; by default, 256 tokens as the model's own settings draw them.
                An answer has a quarter of the context at most.
            config: how KV is blended; the engine's own for None.
            document_id: names the document's chunks in the engine's registry; a later text of that
                name replaces an earlier one. None is a hash of the text.
                ``engine.evict_document`` drops their KV.
            resume: a file in which each answer is kept as a line of JSON. If it exists, its answers
                to the same prompts are taken, and only missing ones are asked for. Unless sampling
                is greedy, the same prompt may have another answer each time: this file keeps one.
            progress: is shown chunks and windows.
            cancel: set it to stop the work; what is done by then stays in ``resume``.
            plan: the fields of AnalysisPlan. ``chunk_tokens``, most tokens of a chunk: 2048, and at
                least 16. ``overlap``, most tokens that a chunk repeats of the one before it: 256,
                and up to half a chunk. ``window``, most chunks of a prompt: 5; fewer if the
                document or the model's context holds fewer. ``combine``: "map_reduce" asks each
                window by itself, and then the model to join the answers, in several rounds if they
                do not fit into one prompt; "refine" gives each window the answer from the windows
                before it to write anew.

        Raises:
            ConfigError: when a size is out of range, a chunk does not fit into a prompt, or the
                file cannot be written.
            DatasetError: when the file holds anything but answers.
            PromptError: when the document or the question is empty, or the question is too long.
        """
        for name, text in (("document", document), ("question", question)):
            if not isinstance(text, str) or not text.strip():
                raise PromptError(f"the {name} is empty: give a text")
        sizes, sampling = AnalysisPlan(**plan), sampling or SamplingParams()
        progress, question = progress or ProgressCallbacks(), question.strip()
        self._log = AnswerLog() if resume is None else AnswerLog.resumed(Path(resume))
        self._engine, self._config = engine, config or engine.config
        self._progress, self._cancel = progress, cancel or Event()
        self._started = time.perf_counter()
        own, tokenizer = engine.instruction, engine.tokenizer
        plain = bool(own) and not begins_as_rendered(own, tokenizer)
        chat = InstructedChat(tokenizer, "" if own else INSTRUCTION, chat_template=not plain)
        self._before = on_day(None, own or chat.lead_in, tokenizer)
        self._behind = f"Question: {question}\nAnswer:{chat.closing}"
        self._is_rendered = chat.has_template
        # A model without a template would go on with a question.
        stop = () if chat.has_template else (f"{SEPARATOR}Question:",)
        self._answer_tokens = min(sampling.max_tokens, engine.context_window // ANSWER_SHARE)
        self._sampling = sampling.with_changes(
            stop=(*sampling.stop, *stop), max_tokens=self._answer_tokens
        )
        self._hash = hashlib.sha256(document.encode("utf-8", "replace")).hexdigest()[:32]
        name = document_id or f"text-{self._hash[:16]}"
        collection = f"{COLLECTION} {sizes.chunk_tokens}/{sizes.overlap}"
        # No more text before a chunk than it has: each chunk is a pass that computes it again.
        behind_lead = engine.context_window - self._tokens(own) - OPENING_TOKENS
        context = min(
            engine.lead_in.document_window, sizes.chunk_tokens, behind_lead - sizes.chunk_tokens
        )
        with progress.phase("cutting the document"):
            self._chunks = cut_document(
                document,
                sizes,
                self._tokens,
                max(context, 0),
                document_id=name,
                collection=collection,
            )
        self._combine, width = sizes.combine, self._width(sizes)
        self.report = LongDocumentReport(
            question=question,
            document_id=name,
            collection=collection,
            tokens=sum(one.new_tokens for one in self._chunks),
            chunks=len(self._chunks),
            window=width,
            windows=len(self._chunks) - width + 1,
        )
        self._computed_to = 0
        self._steps = self._run()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> WindowAnswer:
        return next(self._steps)

    def result(self) -> LongDocumentReport:
        """Answer the remaining windows, and return the report with the combined answer."""
        for _ in self:
            pass
        return self.report

    def _width(self, plan: AnalysisPlan) -> int:
        """Return how many chunks a window has: as many as fit into a prompt wherever they stand.

        Raises ConfigError when not one chunk does, and PromptError for a long question.
        """
        separator = self._tokens(SEPARATOR) + EDGE_TOKENS
        room = self._room()
        if plan.combine == "refine":
            room -= self._tokens(REFINE) + self._answer_tokens + EDGE_TOKENS
        longest = max(one.tokens for one in self._chunks) + separator
        if longest > room:
            engine = self._engine
            raise ConfigError(
                f"chunk_tokens={plan.chunk_tokens} must be at most {max(room - separator, 0)}: "
                f"prompts of model {engine.model_name!r} hold {engine.context_window:,} tokens, "
                "the question and the answer among them"
            )
        return min(plan.window, len(self._chunks), room // longest)

    def _run(self) -> Generator[WindowAnswer, None, None]:
        """Ask each window, then combine the answers."""
        report, engine = self.report, self._engine
        chunks = self._progress.begin("chunks", report.chunks)
        windows = self._progress.begin("windows", report.windows)
        answers: list[str] = []
        try:
            if not engine.read_only:
                kept = [one.chunk for one in self._chunks]
                engine.evict_document(report.document_id, report.collection, kept=kept)
            for index in range(report.windows):
                end = index + report.window
                held = self._chunks[index:end]
                parts: list[Chunk | str] = [part for one in held for part in (one.chunk, SEPARATOR)]
                if answers and self._combine == "refine":
                    parts.append(f"{REFINE.format(answer=answers[-1])}{SEPARATOR}")
                prompt = self._prompt(*parts)
                known = self._log.get(self._key(prompt))
                if known is None:
                    self._compute(index, end, chunks)
                if (answer := self._answered(prompt, known)) is None:
                    return
                answers += self._kept(answer)
                windows.advance()
                place = held[0].start, held[-1].end
                yield WindowAnswer(index, index, end, *place, answer, known is not None)
            self._set(answer=self._combined(answers))
        finally:
            windows.end()
            chunks.end()
            self._set(is_cancelled=self._cancel.is_set() and not self.report.answer)

    def _compute(self, first: int, end: int, task: Task) -> None:
        """Store the KV of those chunks [first, end) that no earlier window held."""
        chunks = [one.chunk for one in self._chunks[max(first, self._computed_to) : end]]
        if self._cancel.is_set():
            return
        if self._engine.read_only:
            self._engine.register(chunks)
        else:
            done = self._engine.precompute(chunks, progress=False)
            self._count(
                computed_chunks=done.computed,
                computed_tokens=done.computed_tokens,
                stored_chunks=done.skipped,
            )
            refused = Counter({str(reason): count for reason, count in done.refused.items()})
            self._set(refused=dict(Counter(self.report.refused) + refused))
        task.advance(end - self._computed_to)
        self._computed_to = end

    def _combined(self, answers: list[str]) -> str:
        """Join answers to one, in as many rounds as it takes; "" if the work was cancelled."""
        if self._combine == "refine":
            return answers[-1] if answers else ""
        heading = self._tokens(f"{SEPARATOR}Part 1000: ") + EDGE_TOKENS
        while len(answers) > 1:
            room = self._room() - self._tokens(COMBINE) - EDGE_TOKENS
            most = max(2, room // (self._answer_tokens + heading))
            joined: list[str] = []
            for start in range(0, len(answers), most):
                group = answers[start : start + most]
                parts = [f"Part {number}: {text}" for number, text in enumerate(group, start=1)]
                prompt = self._prompt(SEPARATOR.join([*parts, COMBINE, ""]))
                answer = self._answered(prompt, self._log.get(self._key(prompt)))
                if answer is None:
                    return ""
                joined += self._kept(answer)
            answers = joined
        return answers[0] if answers else ""

    # Prompts and their answers

    def _prompt(self, *parts: str | Chunk) -> BlendPrompt:
        prompt = BlendPrompt.of(self._before, *parts, self._behind)
        return replace(prompt, is_rendered=self._is_rendered)

    def _room(self) -> int:
        """Return how many tokens a prompt may hold beside the question and an answer.

        Raises PromptTooLongError when there are none.
        """
        try:
            tokens = len(self._engine.prepare(self._prompt()).token_ids)
        except PromptTooLongError as error:
            tokens = error.tokens
        window, answer = self._engine.context_window, self._answer_tokens
        if tokens >= window - answer:
            raise PromptTooLongError(tokens, window, answer_tokens=answer)
        return window - answer - tokens

    def _answered(self, prompt: BlendPrompt, known: PromptAnswer | None) -> PromptAnswer | None:
        """Return the known answer or the engine's, which is logged; None if it was cancelled."""
        if self._cancel.is_set():
            return None
        if known is not None:
            self._count(resumed_prompts=1)
            return known
        generation = self._engine.generate(
            prompt, self._sampling, config=self._config, cancel=self._cancel
        )
        if generation.finish_reason == "cancelled":
            return None
        answer = PromptAnswer.of(generation)
        self._log.put(self._key(prompt), answer)
        self._count(
            prompts=1,
            prompt_tokens=answer.prompt_tokens,
            reused_tokens=answer.reused_tokens,
            recomputed_tokens=answer.recomputed_tokens,
        )
        return answer

    def _kept(self, answer: PromptAnswer) -> list[str]:
        """Return an answer for a later prompt, within its bound of tokens; none if it is empty.

        Tokenizing generated text may give more tokens than were generated.
        """
        text = answer.text
        while (tokens := self._tokens(text)) > self._answer_tokens:
            text = text[: len(text) * self._answer_tokens // tokens]
        return [text] if text else []

    def _key(self, prompt: BlendPrompt) -> Mapping[str, Any]:
        """Return what an answer depends on."""
        return {
            "document": self._hash,
            "prompt": hashlib.sha256(prompt.text.encode()).hexdigest()[:32],
            "model": self._engine.model_name,
            "dtype": self._engine.dtype,
            "kv": self._engine.fingerprint,
            "config": self._config.model_dump(mode="json"),
            "sampling": self._sampling.to_dict(),
        }

    def _tokens(self, text: str) -> int:
        return len(self._engine.tokenize(text))

    def _count(self, **counts: int) -> None:
        """Add to counts of the report."""
        self._set(**{name: getattr(self.report, name) + count for name, count in counts.items()})

    def _set(self, **results: Any) -> None:
        seconds = time.perf_counter() - self._started
        self.report = replace(self.report, seconds=seconds, **results)


analyze_long_document = LongDocumentAnalysis
"""The analysis by the name that says what it does."""
