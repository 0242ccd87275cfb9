"""``cacheblend-rag index``: reads and splits files, embeds chunks, and precomputes their KV."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cacheblend_rag.cli import options, output
from cacheblend_rag.cli.named_settings import SetOption, engine_options, split
from cacheblend_rag.errors import ConfigError, StoreError
from cacheblend_rag.models import DEFAULT_MODEL, absolute
from cacheblend_rag.rag import BUNDLED, DEFAULT_FOLDER, FILE_NAME, checks

if TYPE_CHECKING:
    from cacheblend_rag.rag.indexing import IndexReport

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
        typer.Option(help="A hub name, a folder or a GGUF file.", show_default=DEFAULT_MODEL),
    ] = None,
    engine: options.EngineOption = None,
    settings: SetOption = None,
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
    as_json: options.JsonOption = False,
) -> None:
    """Index text, Markdown, HTML and PDF files: split, embed, and precompute chunk KV.

    Run it again after an interruption, or when files have changed: only new and changed files are
    read. --set takes the collection's own settings, too: chunk_size, chunk_overlap,
    embedding_model, instruction, namespace, dtype, register_only. Exit code 1: KV of some chunks
    could not be stored, because a tier failed or memory was short; the same command computes it
    the next time.
    """
    from cacheblend_rag.rag.collection import (
        Collection,
        CollectionSettings,
        known_paths,
        sole_writer,
    )
    from cacheblend_rag.rag.indexing import Indexing
    from cacheblend_rag.rag.readers import EXTRA, find_files

    paths = list(paths or ())
    if not paths and not repair:
        raise ConfigError("missing argument 'PATH...' (see `cacheblend-rag index --help`)")
    if repair and not paths:
        Collection(into).close()  # raises StoreError without one
    choices, settings = split(settings, CollectionSettings)
    choices = choices.with_given(model=model and absolute(model), engine=engine)
    if choices.embedding_model != BUNDLED:
        choices = choices.with_changes(embedding_model=absolute(choices.embedding_model))
    given = engine_options(settings)
    config = choices.engine_config(into, given)
    checks.check_engine(config.engine)
    checks.check_placement(config.device, config.dtype)
    checks.check_embedding_model(choices.embedding_model)
    checks.check_installed(checks.INDEX_MODULES, "indexing documents", EXTRA)
    with output.stdout_reserved(as_json):
        found = find_files(paths, leave_out=into)
        known = () if rebuild else known_paths(into)
        _check_paths(paths, known, found.files or known, found.unknown)
        if model or not (into / FILE_NAME).exists():  # else it is the collection's own
            checks.check_model(choices.model)
            if "chunk_size" in choices.given():
                checks.check_chunk_size("chunk_size", choices.chunk_size, choices.model)
        with (
            sole_writer(into),
            output.progress_bar(lines=True) as bar,
            Indexing(into, choices, given, bar, rebuild=rebuild) as indexing,
        ):
            report = indexing.report
            try:
                indexing.run(paths, found, prune=prune, repair=repair)
            except KeyboardInterrupt:
                done = f"{report.added + report.changed} files were indexed and stay"
                command = f"the same command{' without --rebuild' if rebuild else ''}"
                output.say(f"interrupted: {done}, {command} continues from here")
                raise typer.Exit(output.INTERRUPTED) from None
    indexed = report.added + report.changed + report.unchanged + report.removed + report.vanished
    if paths and not indexed:
        raise _nothing(paths, found.unknown, len(report.skipped))
    if as_json:
        output.print_json({"collection": str(into), **report.to_dict()})
    else:
        for line in _report_lines(into, report):
            typer.echo(output.one_line(line))
    if report.unfinished_chunks:
        causes = ", ".join(map(str, report.kv.failed)) or "it could not be stored before"
        output.tell(
            f"{report.unfinished_chunks} chunks of {report.unfinished_documents} documents have no "
            f"KV ({causes}): the same command computes it once that is fixed"
        )
        raise typer.Exit(UNFINISHED)


def _check_paths(
    paths: list[Path], known: tuple[Path, ...], files: tuple[Path, ...], unknown: int
) -> None:
    """Raise StoreError when a path does not exist, or there is nothing to do.

    known: the files of the collection's documents; they may be pruned below a missing path.
    """
    for path in paths:
        below = any(file.is_relative_to(path.resolve()) for file in known)
        if not path.is_symlink() and not path.exists() and not below:
            raise StoreError(f"{path} does not exist")
    if not files:
        raise _nothing(paths, unknown, 0)


def _nothing(paths: list[Path], unknown: int, skipped: int) -> StoreError:
    return StoreError(
        f"nothing could be indexed in {', '.join(map(str, paths))}: {skipped} files skipped, "
        f"{unknown} with an extension that is not text, Markdown, HTML or PDF"
    )


def _report_lines(into: Path, report: IndexReport) -> list[str]:
    """Return the totals, then each count that is not zero."""
    kv, pace = report.kv, f" ({report.pace})" if report.kv.computed else ""
    reasons = ", ".join(f"{count} {why}" for why, count in kv.refused.items())
    registered = f"chunk KV: none computed, {kv.registered} chunks registered"
    computed = f"chunk KV: {kv.computed} computed{pace}, {kv.skipped} stored already"
    further = {
        f"chunks without KV: {reasons}": kv.refused,
        f"dropped: KV of {report.evicted_chunks} chunks that no document has": (
            report.evicted_chunks
        ),
        f"skipped: {len(report.skipped)} files, {report.unknown} of other kinds": (
            report.skipped or report.unknown
        ),
        f"read only in part, or in a guessed encoding: {len(report.notes)} files": report.notes,
        f"removed: {report.removed} whose files are gone": report.removed,
        f"kept: {report.vanished} whose files are gone; --prune removes them": report.vanished,
    }
    return [
        f"{into}: {report.documents} documents, {report.chunks} chunks",
        f"files: {report.added} added, {report.changed} changed, {report.unchanged} unchanged",
        registered if kv.registered else computed,
        *(line for line, holds in further.items() if holds),
    ]
