"""``store``: look at, check and empty a folder of chunk KV."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cacheblend_rag.cli.options import JsonOption, finite, store_folder
from cacheblend_rag.cli.output import print_json, progress_bar, result_console
from cacheblend_rag.errors import StoreError
from cacheblend_rag.rag.collection import DEFAULT_FOLDER, KV_NAME
from cacheblend_rag.rag.watching import Task

if TYPE_CHECKING:
    from cacheblend_rag.observe.stored import Condition, StoreFolder

store_app = typer.Typer(help="Look at, check and empty a folder of chunk KV.", no_args_is_help=True)

DEFAULT_STORE = DEFAULT_FOLDER / KV_NAME

StorePath = Annotated[
    Path, typer.Option("--path", envvar="CACHEBLEND_STORE", help="Folder of chunk KV.")
]


@store_app.command()
def stats(path: StorePath = DEFAULT_STORE, as_json: JsonOption = False) -> None:
    """Count chunks and bytes, in all and by fingerprint."""
    with _opened(path) as found:
        held = found.count()
    result = {
        "path": str(path),
        "entries": held.total.entries,
        "bytes": held.total.nbytes,
        "quarantined": held.quarantined,
        "old": held.old,
        "fingerprints": {
            name: {"entries": of.entries, "bytes": of.nbytes}
            for name, of in held.fingerprints.items()
        },
    }
    rows = [(name, of.entries, of.nbytes) for name, of in sorted(held.fingerprints.items())]
    total = ("all", held.total.entries, held.total.nbytes)
    _show(result, as_json, ("fingerprint", "entries", "bytes"), [*rows, total])
    if held.old and not as_json:
        typer.echo(f"{held.old} of an older version: nothing reads them, `evict` removes them")
    if held.quarantined and not as_json:
        typer.echo(f"{held.quarantined} in {path / 'quarantine'}")


@store_app.command("ls")
def list_chunks(path: StorePath = DEFAULT_STORE, as_json: JsonOption = False) -> None:
    """List stored chunks, least recently used first."""
    with _opened(path) as found:
        held = found.by_use()
    chunks = [
        {
            "key": str(key),
            "bytes": entry.nbytes,
            "written_at": entry.written_at,
            "used_at": entry.used_at,
        }
        for key, entry in held
    ]
    rows = [
        (str(key), entry.nbytes, _local_time(entry.written_at), _local_time(entry.used_at))
        for key, entry in held
    ]
    _show({"path": str(path), "chunks": chunks}, as_json, ("key", "bytes", "written", "used"), rows)


@store_app.command()
def verify(
    path: StorePath = DEFAULT_STORE,
    as_json: JsonOption = False,
    repair: Annotated[bool, typer.Option("--repair", help="Quarantine what is damaged.")] = False,
) -> None:
    """Read every chunk through; exits 1 when any is damaged."""
    with _opened(path) as opened, _progress(shown=not as_json) as progress:
        report = opened.store.verify(repair=repair, progress=progress)
    damaged = [{"key": str(found.key), "reason": found.reason} for found in report.damaged]
    result = {
        "path": str(path),
        "checked": report.checked,
        "damaged": damaged,
        "quarantined": len(damaged) if repair else 0,
    }
    _show(result, as_json, ("key", "reason"), [tuple(found.values()) for found in damaged])
    if not as_json:
        typer.echo(f"{report.checked} checked, {len(damaged)} damaged")
    if damaged:
        raise typer.Exit(1)


@store_app.command()
def evict(
    keys: Annotated[list[str] | None, typer.Argument(metavar="[KEY]...", help="Keys.")] = None,
    *,
    path: StorePath = DEFAULT_STORE,
    everything: Annotated[bool, typer.Option("--all", help="All chunks.")] = False,
    fingerprint: Annotated[
        str | None, typer.Option(help="Chunks of this fingerprint: of one model and its settings.")
    ] = None,
    older_than: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", min=0, callback=finite, help="Chunks written longer ago."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask before --all.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Remove chunks: those named, all, or those that match every given condition."""
    condition = _condition(keys or [], everything, fingerprint, older_than)
    with _opened(path) as opened:
        if everything and not yes:
            typer.confirm(f"Evict all chunks in {path}?", abort=True, err=True)
        evicted = opened.store.evict_where(condition)
    _show({"path": str(path), "evicted": evicted}, as_json, ("evicted",), [(evicted,)])


@store_app.command()
def gc(
    folder: Annotated[Path, typer.Option("--collection", help="Folder.")] = DEFAULT_FOLDER,
    as_json: JsonOption = False,
) -> None:
    """Remove what a collection's KV holds of no document that it knows; loads its model.

    Two `index` runs over one collection at once, or one that is killed, can leave such KV.
    """
    from cacheblend_rag.rag.sweeping import evict_unregistered

    evicted = evict_unregistered(folder)
    _show({"path": str(folder), "evicted": evicted}, as_json, ("evicted",), [(evicted,)])


def _condition(
    keys: Sequence[str], everything: bool, fingerprint: str | None, older_than: float | None
) -> Condition:
    """Return the test for chunks to evict; raises StoreError unless the choice is clear."""
    from cacheblend_rag.observe import stored

    filtered = fingerprint is not None or older_than is not None
    if bool(keys) + everything + filtered != 1:
        raise StoreError("give keys, or --all, or --fingerprint and --older-than")
    return stored.named(keys) if keys else stored.matching(fingerprint, older_than)


@contextmanager
def _opened(path: Path) -> Iterator[StoreFolder]:
    """Open a store that is there already; raises StoreError when it cannot be used."""
    store_folder(path)
    from cacheblend_rag.observe import stored

    with stored.opened(path) as found:
        yield found


@contextmanager
def _progress(*, shown: bool) -> Iterator[Callable[[int, int], None]]:
    if not shown:
        yield lambda done, total: None
        return
    with progress_bar() as bar:
        tasks: list[Task] = []

        def advance(done: int, total: int) -> None:
            if not tasks:
                tasks.append(bar.begin("verify", total))
            tasks[0].advance()

        yield advance


def _show(
    result: dict[str, Any], as_json: bool, columns: Sequence[str], rows: Sequence[Sequence[object]]
) -> None:
    if as_json:
        print_json(result)
        return
    from rich.markup import escape
    from rich.table import Table

    table = Table(*columns, box=None)
    for row in rows:
        table.add_row(*(escape(str(cell)) for cell in row))
    console = result_console()
    # Never cut a key short: it is there to be copied.
    console.width = max(console.width, 160)
    console.print(table)


def _local_time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).isoformat(" ", "seconds")
