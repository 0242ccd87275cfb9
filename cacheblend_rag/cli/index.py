"""``cacheblend-rag index``: reads and splits files, embeds chunks, and precomputes their KV."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from cacheblend_rag.cli import options, output
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.models import DEFAULT_MODEL
from cacheblend_rag.rag import checks
from cacheblend_rag.rag.collection import (
    DEFAULT_FOLDER,
    FILE_NAME,
    Collection,
    CollectionSettings,
    known_paths,
    sole_writer,
)
from cacheblend_rag.rag.collection_engine import Placement, resolved_name
from cacheblend_rag.rag.index_report import IndexReport, check_paths
from cacheblend_rag.rag.indexing import Indexing
from cacheblend_rag.rag.readers import EXTRA, find_files
from cacheblend_rag.rag.retrieval import BUNDLED

SMALLEST_CHUNK = 16
UNFINISHED = 1


def index_command(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="PATH...",
            help="Files and folders; optional with --repair.",
            show_default=False,
        ),
    ] = None,
    *,
    into: Annotated[
        Path, typer.Option("--into", metavar="FOLDER", help="The collection to create or update.")
    ] = DEFAULT_FOLDER,
    model: Annotated[
        str | None,
        typer.Option(
            help="A hub name, a folder or a GGUF file.",
            show_default=DEFAULT_MODEL,
        ),
    ] = None,
    chunk_size: Annotated[
        int | None,
        typer.Option(
            min=SMALLEST_CHUNK,
            help="Tokens per chunk.",
            show_default=str(CollectionSettings.chunk_size),
        ),
    ] = None,
    chunk_overlap: Annotated[
        int | None,
        typer.Option(min=0, help="Tokens repeated from the chunk before.", show_default="0"),
    ] = None,
    embedding_model: Annotated[
        str | None,
        typer.Option(
            help="'bundled' or a sentence-transformers name or folder.", show_default=BUNDLED
        ),
    ] = None,
    instruction: Annotated[
        str | None,
        typer.Option(
            help="The text of prompts before the passages.", show_default="the model's default"
        ),
    ] = None,
    namespace: Annotated[
        str | None,
        typer.Option(help="Collections of other namespaces share no KV.", show_default="default"),
    ] = None,
    prune: Annotated[
        bool, typer.Option("--prune", help="Remove documents whose files are gone.")
    ] = False,
    rebuild: Annotated[
        bool, typer.Option("--rebuild", help="Delete the collection first, and create it again.")
    ] = False,
    repair: Annotated[
        bool,
        typer.Option(
            "--repair",
            help="Check all KV of the collection: compute what is missing or damaged, drop that of "
            "no document.",
        ),
    ] = False,
    register_only: Annotated[
        bool,
        typer.Option(
            "--register-only",
            help="Compute no KV now: chats and engines with fill_on_miss do it on a miss.",
        ),
    ] = False,
    engine: options.EngineOption = None,
    profile: options.ProfileOption = None,
    device: options.DeviceOption = None,
    dtype: options.DtypeOption = None,
    store: options.StoreOption = None,
    as_json: options.JsonOption = False,
) -> None:
    """Index text, Markdown, HTML and PDF files: split, embed, and precompute chunk KV.

    Run it again after an interruption, or when files have changed: only new and changed files are
    read. Exit code 1: KV of some chunks could not be stored, because a tier failed or memory was
    short; the same command computes it the next time.
    """
    paths = list(paths or ())
    if repair and register_only:
        raise ConfigError("--repair computes what is missing: leave --register-only out")
    if not paths and not repair:
        raise ConfigError("missing argument 'PATH...' (see `cacheblend-rag index --help`)")
    if repair and not paths:
        Collection.open(into).close()  # raises StoreError without one
    given: dict[str, Any] = {
        "model": model and resolved_name(model),
        "embedding_model": embedding_model and resolved_name(embedding_model),
        "chunk_size": chunk_size,
        "chunk_overlap": chunk_overlap,
        "instruction": instruction,
        "namespace": namespace,
        "dtype": dtype,
        "engine": engine,
    }
    asked = {name: value for name, value in given.items() if value is not None}
    choices = CollectionSettings(**asked)
    checks.check_engine(choices.engine)
    checks.check_embedding_model(choices.embedding_model)
    checks.check_installed(checks.INDEX_MODULES, "indexing documents", EXTRA)
    checks.check_placement(device, dtype)
    placement = Placement(device, options.collection_store(store), profile=profile)
    with output.stdout_reserved(as_json):
        found = find_files(paths, leave_out=into)
        check_paths(paths, found, () if rebuild else known_paths(into))
        if model or not (into / FILE_NAME).exists():  # else it is the collection's own
            checks.check_model(choices.model)
            if chunk_size is not None:
                checks.check_chunk_size(chunk_size, choices.model)
        with (
            sole_writer(into),
            output.progress_bar(lines=True) as bar,
            Indexing(
                into,
                asked,
                bar,
                placement=placement,
                rebuild=rebuild,
                register_only=register_only,
            ) as indexing,
        ):
            try:
                indexing.run(paths, found, prune=prune, repair=repair)
            except KeyboardInterrupt:
                _print_interrupted(indexing.report, rebuild=rebuild)
                raise typer.Exit(output.INTERRUPTED) from None
            report = indexing.report
    if paths:
        report.check(paths)
    if as_json:
        output.print_json({"collection": str(into), **report.to_dict()})
    else:
        for line in _report_lines(into, report):
            typer.echo(output.one_line(line))
    if report.unfinished_chunks:
        output.tell(_unfinished_line(report))
        raise typer.Exit(UNFINISHED)


def _unfinished_line(report: IndexReport) -> str:
    """Return a line on how much KV is missing, and why, if this run knows."""
    causes = ", ".join(report.failures) or "it could not be stored before"
    return (
        f"{report.unfinished_chunks} chunks of {report.unfinished_documents} documents have no KV "
        f"({causes}): the same command computes it once that is fixed"
    )


def _print_interrupted(report: IndexReport, *, rebuild: bool) -> None:
    done = report.added + report.changed
    command = "the same command without --rebuild" if rebuild else "the same command"
    output.side_console().print(
        f"interrupted: {done} files were indexed and stay, {command} continues from here",
        soft_wrap=True,
    )


def _report_lines(into: Path, report: IndexReport) -> list[str]:
    """Return the totals, then each count that is not zero."""
    pace = f" ({report.pace})" if report.computed_chunks else ""
    lines = [
        f"{into}: {report.documents} documents, {report.chunks} chunks",
        f"files: {report.added} added, {report.changed} changed, {report.unchanged} unchanged",
        f"chunk KV: {report.computed_chunks} computed{pace}, {report.stored_chunks} stored already",
    ]
    if report.registered_chunks:
        lines[-1] = f"chunk KV: none computed, {report.registered_chunks} chunks registered"
    if report.refused_chunks:
        reasons = ", ".join(f"{count} {why}" for why, count in report.refused_chunks.items())
        lines.append(f"chunks without KV: {reasons}")
    if report.evicted_chunks:
        lines.append(f"dropped: KV of {report.evicted_chunks} chunks that no document has")
    if report.skipped or report.unknown:
        lines.append(f"skipped: {len(report.skipped)} files, {report.unknown} of other kinds")
    if report.notes:
        lines.append(f"read only in part, or in a guessed encoding: {len(report.notes)} files")
    if report.removed:
        lines.append(f"removed: {report.removed} whose files are gone")
    if report.vanished:
        lines.append(f"kept: {report.vanished} whose files are gone; --prune removes them")
    return lines
