"""Answers a question from a document that is longer than the model's context.

The document is cut into overlapping chunks, whose KV is computed once. A window of several chunks
slides over them, by one chunk each time, and the question is answered from each window: each chunk
is in up to ``window`` prompts, which reuse its KV. The answers are then combined.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any, Self

from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.errors import ConfigError, PromptError
from cacheblend_rag.progress import ProgressCallbacks, Task
from cacheblend_rag.rag.document_report import (
    SUMMARY,
    AnswerLog,
    Combine,
    LongDocumentReport,
    PromptAnswer,
    PromptAsker,
    WindowAnswer,
    WindowPrompts,
    heading,
)
from cacheblend_rag.rag.document_windows import (
    AnalysisPlan,
    CutDocument,
    cut_document,
    fitting_window,
)
from cacheblend_rag.text.chunk import SEPARATOR
from cacheblend_rag.text.encoder import EDGE_TOKENS

if TYPE_CHECKING:
    from cacheblend_rag.engines.base import Engine
    from cacheblend_rag.settings import BlendConfig
    from cacheblend_rag.text.prompt import BlendPrompt

COLLECTION = "long document"
OPENING_TOKENS = 8
"""Upper bound for BOS, and for tokens that an instruction gains by being tokenized with a chunk."""
REFINED = "-"
"""Placeholder for the answer to refine while prompt tokens are counted; its own are added."""


def analyze_long_document(
    engine: Engine,
    document: str,
    question: str = SUMMARY,
    *,
    chunk_tokens: int = AnalysisPlan.chunk_tokens,
    overlap: int = AnalysisPlan.overlap,
    window: int = AnalysisPlan.window,
    combine: Combine = AnalysisPlan.combine,
    sampling: SamplingParams | None = None,
    config: BlendConfig | None = None,
    document_id: str | None = None,
    resume: str | Path | None = None,
    progress: ProgressCallbacks | None = None,
    cancel: Event | None = None,
) -> LongDocumentAnalysis:
    """Answer a question from a document of any length, window by window, and combine the answers.

    The KV of each chunk is computed once, when the first window that holds it is asked, and stays
    in the engine's store; with a ``kv_path`` there, memory does not grow with the document. An
    engine opened with an ``instruction`` has its prompts begin with it.

    Args:
        engine: answers the prompts; any engine, with any lead-in. With ``document``, the default,
            a chunk's KV is computed after the text before it, up to ``chunk_tokens`` or
            ``document_window`` tokens, whichever is less.
        document: the text.
        question: asked of each window; by default, for a summary.
        chunk_tokens: most tokens of a chunk, at least 16.
        overlap: most tokens that a chunk repeats of the one before it, up to half a chunk. It
            ends less than a piece (64 tokens, or a quarter of it) below that.
        window: most chunks of a prompt. There are fewer if the document or the model's context
            holds fewer: ``report.window`` and ``report.window_reason`` say so.
        combine: ``map_reduce`` asks each window by itself, and then the model to join the answers,
            in several rounds if they do not fit into one prompt. ``refine`` gives each window the
            answer from the windows before it to write anew.
        sampling: of all answers; by default, 256 tokens as the model's own settings draw them. An
            answer has a quarter of the context at most.
        config: how KV is blended; the engine's own for None.
        document_id: names the document's chunks in the engine's registry; a later text of that
            name replaces an earlier one. None is a hash of the text. ``engine.evict_document``
            drops their KV.
        resume: a file in which each answer is kept as a line of JSON. If it exists, its answers
            to the same prompts are taken, and only missing ones are asked for. Unless sampling is
            greedy, the same prompt may have another answer each time: this file keeps one.
        progress: is shown chunks and windows.
        cancel: set it to stop the work; what is done by then stays in ``resume``.

    Returns:
        An iterator over the windows' answers, whose ``result`` is the combined answer.

    Raises:
        ConfigError: when a size is out of range, a chunk, or two answers to join, do not fit into
            a prompt, or the file cannot be written.
        DatasetError: when the file holds anything but answers.
        PromptError: when the document or the question is empty, or the question is too long.
    """
    started = time.perf_counter()
    plan = AnalysisPlan(chunk_tokens, overlap, window, combine)
    for name, text in (("document", document), ("question", question)):
        if not isinstance(text, str) or not text.strip():
            raise PromptError(f"the {name} is empty: give a text")
    log = AnswerLog() if resume is None else AnswerLog.resumed(Path(resume))
    prompts = WindowPrompts.of(question.strip(), engine.tokenizer, engine.instruction)
    drawn = sampling or SamplingParams()
    drawn = drawn.with_changes(stop=(*drawn.stop, *prompts.stop))
    asker = PromptAsker(engine, drawn, config=config, log=log, cancel=cancel, document=document)
    progress = progress or ProgressCallbacks()
    with progress.phase("cutting the document"):
        cut = cut_document(
            document,
            plan,
            lambda text: len(engine.tokenize(text)),
            _context_tokens(engine, chunk_tokens),
            document_id=document_id or f"text-{asker.document_hash[:16]}",
            collection=f"{COLLECTION} {chunk_tokens}/{overlap}",
        )
    return LongDocumentAnalysis(
        engine, asker=asker, prompts=prompts, cut=cut, plan=plan, progress=progress, started=started
    )


class LongDocumentAnalysis:
    """An analysis of a long document: an iterator over its windows' answers, in order.

    Nothing is computed before the first answer is asked for. Not to be shared between threads;
    ``analyze_long_document`` makes it.

    Args:
        engine, asker: the engine, and what asks it with the request's settings.
        prompts, cut: the prompts of windows and of joined answers; the document's chunks.
        plan: how many chunks a window has, and how answers are combined.
        progress, started: is told of each window; the beginning, by ``time.perf_counter``.

    Attributes:
        report: the plan and the results so far.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        asker: PromptAsker,
        prompts: WindowPrompts,
        cut: CutDocument,
        plan: AnalysisPlan,
        progress: ProgressCallbacks,
        started: float,
    ) -> None:
        self._engine, self._asker, self._prompts = engine, asker, prompts
        self._cut, self._progress, self._started = cut, progress, started
        width, reason = self._fitted(plan)
        self.report = LongDocumentReport(
            question=prompts.question,
            document_id=cut.document_id,
            collection=cut.chunks[0].chunk.collection,
            characters=cut.characters,
            tokens=cut.tokens,
            chunks=len(cut.chunks),
            chunk_tokens=plan.chunk_tokens,
            overlap=plan.overlap,
            asked_window=plan.window,
            window=width,
            window_reason=reason,
            windows=len(cut.chunks) - width + 1,
            combine=plan.combine,
        )
        self._counts: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        self._computed_to = 0
        self._is_cancelled = False
        self._steps = self._run()

    def _fitted(self, plan: AnalysisPlan) -> tuple[int, str | None]:
        """Return how many chunks a window has, and why they are fewer than asked for.

        Raises ConfigError when not one chunk fits into a prompt, or not two answers into one that
        joins them, and PromptError for a long question.
        """
        separator = len(self._engine.tokenize(SEPARATOR)) + EDGE_TOKENS
        sizes = [one.tokens + separator for one in self._cut.chunks]
        room = self._asker.room(self._prompts.window((), REFINED * (plan.combine == "refine")))
        if plan.combine == "refine":
            room -= self._asker.answer_tokens + EDGE_TOKENS
        width = fitting_window(sizes, plan.window, room)
        held = f"prompts of model {self._engine.model_name!r} hold {self._engine.context_window:,}"
        if not width:
            raise ConfigError(
                f"chunk_tokens={plan.chunk_tokens} must be at most {max(room - separator, 0)}: "
                f"{held} tokens, the question and the answer among them"
            )
        if plan.combine == "map_reduce" and width < len(sizes):
            least = sum(self._asker.answer_tokens + self._heading_tokens(one) for one in (1, 2))
            if self._asker.room(self._prompts.combining(())) < least:
                raise ConfigError(
                    f"max_tokens={self._asker.answer_tokens} is too much to join two answers: "
                    f"{held} tokens; give fewer, or combine='refine'"
                )
        if width < min(plan.window, len(sizes)):
            return width, f"{held} tokens, {room:,} of them for chunks"
        return width, f"the document has {len(sizes)} chunks" if width < plan.window else None

    def _heading_tokens(self, number: int) -> int:
        """Return how many tokens stand before an answer in a prompt that joins several, at most."""
        return len(self._engine.tokenize(f"{SEPARATOR}{heading(number)}")) + EDGE_TOKENS

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> WindowAnswer:
        return next(self._steps)

    def result(self) -> LongDocumentReport:
        """Answer the remaining windows, and return the report with the combined answer."""
        for _ in self:
            pass
        return self.report

    def _run(self) -> Generator[WindowAnswer, None, None]:
        """Ask each window, then combine the answers."""
        report = self.report
        chunks = self._progress.begin("chunks", report.chunks)
        windows = self._progress.begin("windows", report.windows)
        answers: list[str] = []
        try:
            if not self._engine.read_only:
                kept = [one.chunk for one in self._cut.chunks]
                self._engine.evict_document(report.document_id, report.collection, kept=kept)
            for index in range(report.windows):
                held = self._cut.chunks[index : index + report.window]
                so_far = answers[-1] if answers and report.combine == "refine" else ""
                prompt = self._prompts.window([one.chunk for one in held], so_far)
                known = self._asker.known(prompt)
                if known is None:
                    self._compute(index, index + report.window, chunks)
                if (answer := self._answered(prompt, known)) is None:
                    return
                answers += [self._asker.within(answer.text)] if answer.text else []
                windows.advance()
                self._note()
                place = held[0].start, held[-1].end
                end = index + len(held)
                yield WindowAnswer(index, index, end, *place, answer, known is not None)
            self._note(self._combined(answers))
        finally:
            windows.end()
            chunks.end()
            self._note()

    def _compute(self, first: int, end: int, task: Task) -> None:
        """Store the KV of those chunks [first, end) that no earlier window held."""
        new = self._cut.chunks[max(first, self._computed_to) : end]
        if self._asker.is_cancelled:
            return
        engine, chunks = self._engine, [one.chunk for one in new]
        if engine.read_only:
            engine.register(chunks)
        else:
            done = engine.precompute(chunks, progress=False)
            self._counts.update(
                computed_chunks=done.computed,
                computed_tokens=done.computed_tokens,
                stored_chunks=done.skipped,
            )
            self._refused.update({str(reason): n for reason, n in done.refused.items()})
        task.advance(end - self._computed_to)
        self._computed_to = end

    def _answered(self, prompt: BlendPrompt, known: PromptAnswer | None) -> PromptAnswer | None:
        """Return a prompt's answer, and count it; None if the work was cancelled."""
        if known is not None and not self._asker.is_cancelled:
            self._counts["resumed_prompts"] += 1
            return known
        answer = self._asker.ask(prompt)
        if answer is None:
            self._is_cancelled = True
            return None
        self._counts.update(
            prompts=1,
            prompt_tokens=answer.prompt_tokens,
            reused_tokens=answer.reused_tokens,
            recomputed_tokens=answer.recomputed_tokens,
        )
        return answer

    def _combined(self, answers: Sequence[str]) -> str:
        """Join answers to one, in as many rounds as it takes; "" if the work was cancelled."""
        if self.report.combine == "refine":
            return answers[-1] if answers else ""
        while len(answers) > 1:
            groups = self._groups(answers)
            task = self._progress.begin("answers to combine", len(groups))
            joined: list[str] = []
            try:
                for group in groups:
                    text = self._joined(group)
                    if text is None:
                        return ""
                    joined += [self._asker.within(text)] if text else []
                    task.advance()
            finally:
                task.end()
            answers = joined
        return answers[0] if answers else ""

    def _joined(self, group: Sequence[str]) -> str | None:
        """Join answers that fit into one prompt; None if the work was cancelled."""
        if len(group) == 1:
            return group[0]
        prompt = self._prompts.combining(group)
        answer = self._answered(prompt, self._asker.known(prompt))
        return None if answer is None else answer.text

    def _groups(self, answers: Sequence[str]) -> list[list[str]]:
        """Return consecutive answers that fit into a prompt each, two at least."""
        room = self._asker.room(self._prompts.combining(()))
        groups: list[list[str]] = [[]]
        left = room
        for text in answers:
            own = len(self._engine.tokenize(text))
            tokens = own + self._heading_tokens(len(groups[-1]) + 1)
            if tokens > left and len(groups[-1]) > 1:
                groups.append([])
                left, tokens = room, own + self._heading_tokens(1)
            groups[-1].append(text)
            left -= tokens
        return groups

    def _note(self, answer: str = "") -> None:
        """Update the report with the counts and the time so far."""
        counts: dict[str, Any] = dict(self._counts)
        self.report = replace(
            self.report,
            **counts,
            refused=dict(self._refused),
            answer=answer or self.report.answer,
            is_cancelled=self._is_cancelled,
            seconds=time.perf_counter() - self._started,
        )


def _context_tokens(engine: Engine, chunk_tokens: int) -> Callable[[int], int]:
    """Return how many tokens may stand before a chunk of so many, while its KV is computed.

    No more than a chunk has: each chunk is a pass of its own, which computes them again.
    """
    lead = len(engine.tokenize(engine.instruction)) + OPENING_TOKENS
    longest = engine.context_window - lead
    wanted = min(engine.lead_in.document_window, chunk_tokens)

    def most(tokens: int) -> int:
        return max(0, min(wanted, longest - tokens))

    return most
