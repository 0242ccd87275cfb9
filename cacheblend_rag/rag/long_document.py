"""Answers a question from a document that is longer than the model's context.

The document is cut into overlapping chunks, whose KV is computed once. A window of several chunks
slides over them, by one chunk each time, and the question is answered from each window: each chunk
is in up to ``window`` prompts, which reuse its KV. The answers are then combined.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.errors import ConfigError, PromptError, PromptTooLongError
from cacheblend_rag.progress import ProgressCallbacks
from cacheblend_rag.rag.document_windows import AnalysisPlan, cut_document
from cacheblend_rag.rag.prompt import ANSWER_SHARE, Passage, RagPrompt, Turn
from cacheblend_rag.result_log import ResultLog
from cacheblend_rag.text.chunk import SEPARATOR, Chunk
from cacheblend_rag.text.encoder import EDGE_TOKENS

if TYPE_CHECKING:
    from cacheblend_rag.engines.base import Engine
    from cacheblend_rag.settings import BlendConfig

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
        prompt_tokens, reused_tokens, recomputed_tokens: as in BlendReport.
    """

    text: str
    finish_reason: str
    prompt_tokens: int
    reused_tokens: int
    recomputed_tokens: int


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
        tokens: length of the document.
        chunks, windows: how many chunks and windows there are.
        window: chunks in a window; fewer than asked for if the model's context or the document
            holds fewer.
        computed_chunks, computed_tokens: chunks whose KV was computed and stored.
        stored_chunks: chunks whose KV was stored already.
        refused: how many chunks were not stored, by reason; windows compute them.
        prompts, resumed_prompts: prompts that the engine answered, or an earlier run.
        prompt_tokens, reused_tokens: sums over those that the engine answered.
        answer: the combined answer; "" until it is known.
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
    answer: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return asdict(self)


def default_lead_in(tokenizer: Any) -> str:
    """Return the text before the first passage, the ``instruction`` of an engine for analyses."""
    return RagPrompt(tokenizer, INSTRUCTION).lead_in


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
        **plan: Any,
    ) -> None:
        """Cut the document, and plan its windows.

        Args:
            engine: answers the prompts; any engine, with any lead-in. With ``document``, the
                default, a chunk's KV is computed after the chunk before it.
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
        self._plan, sampling = AnalysisPlan(**plan), sampling or SamplingParams()
        self._log = AnswerLog() if resume is None else AnswerLog.resumed(Path(resume))
        self._engine, self._config = engine, config or engine.config
        self._progress, self._question = progress or ProgressCallbacks(), question.strip()
        own = engine.instruction
        self._prompt = RagPrompt.of_engine(engine.tokenizer, own, None if own else INSTRUCTION)
        self._answer_tokens = min(sampling.max_tokens, engine.context_window // ANSWER_SHARE)
        self._sampling = sampling.with_changes(
            stop=(*sampling.stop, *self._prompt.stop), max_tokens=self._answer_tokens
        )
        with self._progress.phase("cutting the document"):
            self._spans = cut_document(document, self._plan, self._tokens)
        digest = hashlib.sha256(document.encode("utf-8", "replace")).hexdigest()
        collection = f"long document {self._plan.chunk_tokens}/{self._plan.overlap}"
        name = document_id or f"text-{digest[:16]}"
        self._room = self._room_beside_question()
        width = self._width()
        self._chunks, context, self._stored = list[Chunk](), tuple[str, ...](), 0
        for one in self._spans:
            text = document[one.start : one.end]
            self._chunks.append(Chunk(text, name, context, collection))
            context = (text, SEPARATOR) if width > 1 else ()  # else two may not fit into a pass
        self.report = LongDocumentReport(
            question=self._question,
            document_id=name,
            collection=collection,
            tokens=self._tokens(document),
            chunks=len(self._chunks),
            window=width,
            windows=len(self._chunks) - width + 1,
        )
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

    def _room_beside_question(self) -> int:
        """Return how many tokens of passages a prompt may hold; raises PromptTooLongError."""
        window, answer = self._engine.context_window, self._answer_tokens
        tokens = self._tokens(self._prompt.render([Turn(self._question)])) + EDGE_TOKENS
        if tokens >= window - answer:
            raise PromptTooLongError(tokens, window, answer_tokens=answer)
        return window - answer - tokens

    def _width(self) -> int:
        """Return how many chunks a window has: as many as fit into a prompt wherever they stand.

        Raises ConfigError when not one chunk does.
        """
        separator, room = self._tokens(SEPARATOR) + EDGE_TOKENS, self._room
        if self._plan.combine == "refine":
            room -= self._tokens(REFINE) + self._answer_tokens + EDGE_TOKENS
        longest = max(one.tokens for one in self._spans) + separator
        if longest > room:
            engine = self._engine
            raise ConfigError(
                f"chunk_tokens={self._plan.chunk_tokens} must be at most "
                f"{max(room - separator, 0)}: prompts of model {engine.model_name!r} hold "
                f"{engine.context_window:,} tokens, the question and the answer among them"
            )
        return min(self._plan.window, len(self._spans), room // longest)

    def _run(self) -> Iterator[WindowAnswer]:
        """Ask each window, then combine the answers."""
        report, engine, answers = self.report, self._engine, list[str]()
        task = self._progress.begin("windows", report.windows)
        try:
            if not engine.read_only:  # the document may replace an earlier text of its name
                engine.evict_document(report.document_id, report.collection, kept=self._chunks)
            for first in range(report.windows):
                end = first + report.window
                passages: list[Passage] = [*self._chunks[first:end]]
                if answers and self._plan.combine == "refine":
                    passages.append(REFINE.format(answer=answers[-1]))
                answer, is_resumed = self._answered(passages, first, end)
                answers += self._kept(answer)
                task.advance()
                place = (self._spans[first].start, self._spans[end - 1].end)
                yield WindowAnswer(first, first, end, *place, answer, is_resumed)
            combined = self._combined(answers)
            self.report = replace(self.report, answer=combined)
        finally:
            task.end()

    def _combined(self, answers: list[str]) -> str:
        """Join answers to one, in as many rounds as it takes."""
        if self._plan.combine == "refine":
            return answers[-1] if answers else ""
        heading = self._tokens(f"{SEPARATOR}Part 1000: ") + EDGE_TOKENS
        room = self._room - self._tokens(COMBINE) - EDGE_TOKENS
        most = max(2, room // (self._answer_tokens + heading))
        while len(answers) > 1:
            joined: list[str] = []
            for start in range(0, len(answers), most):
                group = enumerate(answers[start : start + most], start=1)
                parts = [f"Part {number}: {text}" for number, text in group]
                answer, _ = self._answered([*parts, COMBINE])
                joined += self._kept(answer)
            answers = joined
        return answers[0] if answers else ""

    def _answered(
        self, passages: Sequence[Passage], first: int = 0, end: int = 0
    ) -> tuple[PromptAnswer, bool]:
        """Return the answer to the question behind passages, and whether an earlier run gave it.

        first, end: the document's chunks [first, end) are among the passages.
        """
        engine, turns = self._engine, [Turn.of(self._question, passages)]
        key = {
            "prompt": hashlib.sha256(self._prompt.render(turns).encode()).hexdigest()[:32],
            "model": engine.model_name,
            "dtype": engine.dtype,
            "kv": engine.fingerprint,
            "config": self._config.model_dump(mode="json"),
            "sampling": self._sampling.to_dict(),
        }
        if (known := self._log.get(key)) is not None:
            self._count(resumed_prompts=1)
            return known, True
        if end > self._stored:
            self._store(first, end)
        prompt = self._prompt.segmented(turns, engine.registry)
        made = engine.generate(prompt, self._sampling, config=self._config)
        told = made.report
        tokens = (told.prompt_tokens, told.reused_tokens, told.recomputed_tokens)
        answer = PromptAnswer(made.text.strip(), made.finish_reason, *tokens)
        self._log.put(key, answer)
        self._count(prompts=1, prompt_tokens=tokens[0], reused_tokens=tokens[1])
        return answer, False

    def _store(self, first: int, end: int) -> None:
        """Store the KV of those chunks [first, end) that no earlier window held."""
        chunks, self._stored = self._chunks[max(first, self._stored) : end], end
        if self._engine.read_only:
            self._engine.register(chunks)
            return
        done = self._engine.precompute(chunks, progress=False)
        self._count(
            computed_chunks=done.computed,
            computed_tokens=done.computed_tokens,
            stored_chunks=done.skipped,
        )
        refused = Counter({str(reason): count for reason, count in done.refused.items()})
        self.report = replace(self.report, refused=dict(Counter(self.report.refused) + refused))

    def _kept(self, answer: PromptAnswer) -> list[str]:
        """Return an answer for a later prompt, within its bound of tokens; none if it is empty.

        Tokenizing generated text may give more tokens than were generated.
        """
        text = answer.text
        while (tokens := self._tokens(text)) > self._answer_tokens:
            text = text[: len(text) * self._answer_tokens // tokens]
        return [text] if text else []

    def _tokens(self, text: str) -> int:
        return len(self._engine.tokenize(text))

    def _count(self, **counts: int) -> None:
        """Add to counts of the report."""
        sums = {name: getattr(self.report, name) + count for name, count in counts.items()}
        self.report = replace(self.report, **sums)


analyze_long_document = LongDocumentAnalysis
"""The analysis by the name that says what it does."""
