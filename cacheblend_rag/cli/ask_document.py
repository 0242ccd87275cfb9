"""``ask --document``: answers a question from a document longer than the context."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import typer

from cacheblend_rag.cli import asking, options, output
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.errors import PromptError
from cacheblend_rag.models import DEFAULT_MODEL
from cacheblend_rag.rag import checks
from cacheblend_rag.rag.document_windows import AnalysisPlan
from cacheblend_rag.rag.long_document import (
    SUMMARY,
    AnswerLog,
    LongDocumentReport,
    analyze_long_document,
    default_lead_in,
)
from cacheblend_rag.rag.readers import EXTRACTORS, UnreadableFileError, read_file
from cacheblend_rag.settings import EMBEDDED, EngineConfig

DEFAULT_KV_PATH = ".cacheblend-documents"


def ask_document(
    path: Path,
    question: str | None,
    plan: AnalysisPlan,
    sampling: SamplingParams,
    given: Mapping[str, Any],
    *,
    resume: Path | None,
    as_json: bool,
) -> None:
    """Answer from a document, window by window, and print the answers as they come.

    The KV of each chunk is computed once and kept; another question about the same file computes
    none. Ctrl-C ends it; with ``resume`` the same command goes on.
    """
    if not path.is_file() or path.suffix.lower() not in EXTRACTORS:
        raise PromptError(f"--document {path} must be a file of a kind {' '.join(EXTRACTORS)}")
    defaults = {
        "engine": EMBEDDED,
        "model": DEFAULT_MODEL,
        "instruction": default_lead_in,
        "kv_path": os.environ.get(options.KV_PATH_VARIABLE) or DEFAULT_KV_PATH,
    }
    config = EngineConfig.gather(**{**defaults, **given})
    if config.store.kv_path is not None:
        options.store_folder(Path(config.store.kv_path))
    with output.stdout_reserved(as_json), output.progress_bar(lines=True) as progress:
        checks.check_config(config)
        checks.check_chunk_size("chunk_tokens", plan.chunk_tokens, config.model)
        if resume is not None:
            AnswerLog.resumed(resume)  # refused before anything is loaded, if it is no such file
        try:
            found = read_file(path)
        except UnreadableFileError as error:
            raise PromptError(f"{path} cannot be analyzed: {error}") from error
        if found.note:
            output.warn(f"{path}: {found.note}")
        try:
            with closing(asking.load_engine(config, progress)) as engine:
                analysis = analyze_long_document(
                    engine,
                    found.text,
                    question or SUMMARY,
                    sampling=sampling,
                    document_id=str(path.resolve()),
                    resume=resume,
                    progress=progress,
                    **plan.model_dump(),
                )
                windows, answers = analysis.report.windows, []
                for one in analysis:
                    answers.append(one.to_dict())
                    if not as_json:
                        place = f"characters {one.start:,} to {one.end:,}"
                        typer.echo(f"window {one.window + 1} of {windows}, {place}:")
                        typer.echo(f"{output.printable(one.text)}\n")
        except KeyboardInterrupt:
            goes_on = "the same command goes on from here"
            kept = "--resume FILE keeps answers" if resume is None else goes_on
            output.say(f"interrupted: chunk KV stays, {kept}")
            raise typer.Exit(output.INTERRUPTED) from None
    if as_json:
        about = {"model": engine.model_name, "dtype": engine.dtype, "engine": engine.name}
        output.print_json({**about, **analysis.report.to_dict(), "answers": answers})
        return
    typer.echo(f"answer:\n{output.printable(analysis.report.answer)}\n\nreport:")
    for line in report_lines(analysis.report):
        typer.echo(f"  {line}")


def report_lines(report: LongDocumentReport) -> list[str]:
    """Return lines on the document, the chunks' KV and the prompts."""
    reasons = "".join(f", {count} refused: {why}" for why, count in report.refused.items())
    reused = output.percent(report.reused_tokens / max(report.prompt_tokens, 1))
    return [
        f"{report.tokens:,} tokens: {report.chunks} chunks, {report.windows} windows of "
        f"{report.window}",
        f"chunk KV: {report.computed_chunks} computed, {report.stored_chunks} stored already"
        f"{reasons}",
        f"prompts: {report.prompts} answered, {report.resumed_prompts} answered before",
        f"prompt tokens: {report.prompt_tokens:,}, {reused} reused",
    ]
