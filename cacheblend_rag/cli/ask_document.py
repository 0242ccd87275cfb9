"""``ask --document``: answers a question from a document longer than the context."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from cacheblend_rag.cli import asking, output
from cacheblend_rag.errors import PromptError, StoreError
from cacheblend_rag.rag import checks
from cacheblend_rag.rag.document_report import SUMMARY, AnswerLog, default_lead_in
from cacheblend_rag.rag.extracting import EXTRACTORS
from cacheblend_rag.rag.readers import FileReader, UnreadableFileError
from cacheblend_rag.settings import EMBEDDED

if TYPE_CHECKING:
    from cacheblend_rag.engines.sampling import SamplingParams
    from cacheblend_rag.progress import ProgressCallbacks
    from cacheblend_rag.rag.document_report import LongDocumentReport, WindowAnswer
    from cacheblend_rag.rag.document_windows import AnalysisPlan
    from cacheblend_rag.rag.long_document import LongDocumentAnalysis
    from cacheblend_rag.settings import StoreConfig


def ask_document(
    path: Path,
    question: str | None,
    plan: AnalysisPlan,
    sampling: SamplingParams,
    *,
    store: StoreConfig,
    model: str,
    engine: str | None,
    device: str | None,
    profile: str | None,
    ratio: float | None,
    selector: str | None,
    resume: Path | None,
    as_json: bool,
) -> None:
    """Answer from a document, window by window, and print the answers as they come.

    The KV of each chunk is computed once and kept; another question about the same file computes
    none. Ctrl-C ends it; with ``resume`` the same command goes on.
    """
    _check(path)
    with output.stdout_reserved(as_json):
        checks.check_blend(ratio, selector)
        config = asking.checked_config(
            engine or EMBEDDED,
            model,
            store=store,
            device=device,
            profile=profile,
            instruction=default_lead_in,
        )
        checks.check_chunk_size(plan.chunk_tokens, model, "--chunk-tokens")
        if resume is not None:
            AnswerLog.resumed(resume)  # refused before anything is loaded, if it is no such file
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        with output.progress_bar(lines=True) as progress:
            text = _read(path, progress)
            opened = asking.load_engine(config, progress)
            try:
                from cacheblend_rag.rag.long_document import analyze_long_document

                analysis = analyze_long_document(
                    opened,
                    text,
                    question or SUMMARY,
                    chunk_tokens=plan.chunk_tokens,
                    overlap=plan.overlap,
                    window=plan.window,
                    combine=plan.combine,
                    sampling=sampling,
                    config=opened.config.with_given(recompute_ratio=ratio, selector=selector),
                    document_id=str(path.resolve()),
                    resume=resume,
                    progress=progress,
                )
                answers = list(_shown(analysis, shown=not as_json))
                about = {
                    "model": opened.model_name,
                    "dtype": opened.dtype,
                    "engine": opened.name,
                }
            except KeyboardInterrupt:
                _print_interrupted(resume)
                raise typer.Exit(output.INTERRUPTED) from None
            finally:
                opened.close()
    if as_json:
        plain = [one.to_dict() for one in answers]
        output.print_json({**about, **analysis.report.to_dict(), "answers": plain})
        return
    typer.echo(f"answer:\n{output.printable(analysis.report.answer)}\n\nreport:")
    for line in report_lines(analysis.report):
        typer.echo(f"  {line}")


def _check(path: Path) -> None:
    """Raise StoreError if nothing is there, PromptError if it is no file of a known type."""
    if not path.exists():
        raise StoreError(f"{path} does not exist: give the path of a document")
    if not path.is_file():
        raise PromptError(f"{path} is not a file: give one document")
    if path.suffix.lower() not in EXTRACTORS:
        raise PromptError(f"{path} must be one of {' '.join(EXTRACTORS)}, by its name")


def _read(path: Path, progress: ProgressCallbacks) -> str:
    """Return a file's text; raises PromptError when it has none, MissingExtraError."""
    try:
        with progress.phase(f"reading {path.name}"), FileReader() as reader:
            found = reader.read(path)
    except UnreadableFileError as error:
        raise PromptError(f"{path} cannot be analyzed: {error}") from error
    if found.note:
        progress.warn(f"{path}: {found.note}")
    return found.text


def _shown(analysis: LongDocumentAnalysis, *, shown: bool) -> Iterator[WindowAnswer]:
    """Yield the windows' answers, and print each as it comes."""
    plan = analysis.report
    if plan.window_reason:
        output.warn(
            f"windows of {plan.window} chunks, not {plan.asked_window}: {plan.window_reason}"
        )
    for one in analysis:
        if shown:
            place = f"characters {one.start:,} to {one.end:,}"
            typer.echo(f"window {one.window + 1} of {plan.windows}, {place}:")
            typer.echo(f"{output.printable(one.text)}\n")
        yield one


def report_lines(report: LongDocumentReport) -> list[str]:
    """Return lines on the document, the chunks' KV and the prompts."""
    lines = [
        f"{report.tokens:,} tokens: {report.chunks} chunks, {report.windows} windows of "
        f"{report.window}",
        f"chunk KV: {report.computed_chunks} computed, {report.stored_chunks} stored already",
    ]
    if report.refused:
        reasons = ", ".join(f"{count} {why}" for why, count in report.refused.items())
        lines.append(f"chunks without KV: {reasons}")
    earlier = f", {report.resumed_prompts} answered before" if report.resumed_prompts else ""
    lines.append(f"prompts: {report.prompts} answered{earlier}")
    if report.prompt_tokens:
        share = output.percent(report.reused_tokens / report.prompt_tokens)
        lines.append(
            f"prompt tokens: {report.prompt_tokens:,}, {report.reused_tokens:,} reused ({share})"
        )
    lines.append(f"time: {output.rough_duration(report.seconds)}")
    return lines


def _print_interrupted(resume: Path | None) -> None:
    kept = "--resume FILE keeps answers" if resume is None else "the same command goes on from here"
    output.side_console().print(f"interrupted: chunk KV stays, {kept}", soft_wrap=True)
