"""``cacheblend-rag analyze``: answers a question from a document longer than the context."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from cacheblend_rag.cli import asking, options, output
from cacheblend_rag.models import DEFAULT_MODEL
from cacheblend_rag.rag import checks
from cacheblend_rag.rag.answering import clean_question
from cacheblend_rag.rag.document_engine import (
    DEFAULT_KV_PATH,
    AnalysisEngine,
    check_document,
    read_document,
)
from cacheblend_rag.rag.document_report import AnswerLog
from cacheblend_rag.rag.document_windows import AnalysisPlan
from cacheblend_rag.rag.window_prompts import SUMMARY
from cacheblend_rag.settings import EMBEDDED

if TYPE_CHECKING:
    from cacheblend_rag.rag.document_report import LongDocumentReport, WindowAnswer
    from cacheblend_rag.rag.long_document import LongDocumentAnalysis


def analyze_command(
    path: Annotated[
        Path, typer.Argument(metavar="FILE", help="Text, Markdown, HTML or PDF of any length.")
    ],
    *,
    question: Annotated[
        str, typer.Option("--question", "-q", help="Asked of each window.", show_default="summary")
    ] = SUMMARY,
    model: options.ModelOption = DEFAULT_MODEL,
    window: Annotated[
        int, typer.Option(min=1, help="Most chunks in a prompt; fewer if the context is small.")
    ] = AnalysisPlan.window,
    chunk_tokens: Annotated[
        int, typer.Option(min=1, help="Most tokens of a chunk.")
    ] = AnalysisPlan.chunk_tokens,
    overlap: Annotated[
        int, typer.Option(min=0, help="Most tokens that a chunk repeats of the one before it.")
    ] = AnalysisPlan.overlap,
    combine: Annotated[
        Literal["map_reduce", "refine"],
        typer.Option(
            help="Join the windows' answers at the end, or have each window refine the last one."
        ),
    ] = AnalysisPlan.combine,
    max_tokens: options.MaxTokensOption = asking.MAX_TOKENS,
    temperature: options.TemperatureOption = None,
    top_p: options.TopPOption = None,
    seed: options.SeedOption = None,
    ratio: asking.RatioOption = None,
    selector: asking.SelectorOption = None,
    profile: options.ProfileOption = None,
    resume: Annotated[
        Path | None,
        typer.Option(help="Keep each answer in this file, and go on from it."),
    ] = None,
    kv_path: Annotated[
        Path, typer.Option(envvar=options.KV_PATH_VARIABLE, help="Folder of chunk KV.")
    ] = DEFAULT_KV_PATH,
    store: options.StoreOption = None,
    engine: options.EngineOption = None,
    device: options.DeviceOption = None,
    dtype: options.DtypeOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """Answer a question from a document longer than the model's context, window by window.

    The KV of each chunk is computed once and kept; another question about the same file computes
    none. Ctrl-C ends it; with --resume the same command goes on.
    """
    asked = clean_question(question)
    plan = AnalysisPlan(chunk_tokens, overlap, window, combine)
    sampling = options.sampling_settings(
        max_tokens, temperature=temperature, top_p=top_p, seed=seed
    )
    check_document(path)
    with output.stdout_reserved(as_json):
        chosen = AnalysisEngine(
            options.store_settings(store, kv_path=options.store_folder(kv_path)),
            model,
            engine or EMBEDDED,
            device=device,
            dtype=dtype,
            profile=profile,
            ratio=ratio,
            selector=selector,
        )
        checks.check_chunk_size(chunk_tokens, model, "--chunk-tokens")
        if resume is not None:
            AnswerLog.resumed(resume)  # refused before anything is loaded, if it is no such file
        with output.progress_bar(lines=True) as progress:
            with progress.phase(f"reading {path.name}"):
                found = read_document(path)
            text = found.text
            if found.note:
                progress.warn(f"{path}: {found.note}")
            opened = chosen.open(progress)
            try:
                from cacheblend_rag.rag.long_document import analyze_long_document

                analysis = analyze_long_document(
                    opened,
                    text,
                    asked,
                    chunk_tokens=plan.chunk_tokens,
                    overlap=plan.overlap,
                    window=plan.window,
                    combine=plan.combine,
                    sampling=sampling,
                    config=chosen.config(opened),
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
