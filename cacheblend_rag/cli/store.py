"""``store``: look at, check and empty a folder of chunk KV."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from cacheblend_rag.cli.options import finite
from cacheblend_rag.cli.output import JsonOption, print_json, progress_bar, result_console
from cacheblend_rag.errors import StoreError
from cacheblend_rag.rag.collection import DEFAULT_FOLDER, FILE_NAME, KV_NAME
from cacheblend_rag.rag.watching import Task

if TYPE_CHECKING:
    from cacheblend_rag.engines.transformers.engine import TransformersEngine
    from cacheblend_rag.kv import DiskTier, Entry, KVKey, TieredKVStore

USAGE_NAME = "usage"
"""The file in which every store counts what it holds."""

store_app = typer.Typer(help="Look at, check and empty a folder of chunk KV.", no_args_is_help=True)

DEFAULT_STORE = DEFAULT_FOLDER / KV_NAME

StorePath = Annotated[
    Path, typer.Option("--path", envvar="CACHEBLEND_STORE", help="Folder of chunk KV.")
]


@store_app.command()
def stats(path: StorePath = DEFAULT_STORE, as_json: JsonOption = False) -> None:
    """Count chunks and bytes, in all and by fingerprint."""
    with _opened(path) as (store, disk):
        held = store.entries()
        quarantined = disk.quarantined()
    by_fingerprint: dict[str, dict[str, int]] = defaultdict(lambda: {"entries": 0, "bytes": 0})
    for key, entry in held.items():
        by_fingerprint[key.fingerprint]["entries"] += 1
        by_fingerprint[key.fingerprint]["bytes"] += entry.nbytes
    nbytes = sum(entry.nbytes for entry in held.values())
    result = {
        "path": str(path),
        "entries": len(held),
        "bytes": nbytes,
        "quarantined": len(quarantined),
        "old": sum(key.is_old for key in held),
        "fingerprints": dict(by_fingerprint),
    }
    rows = [(name, *of.values()) for name, of in sorted(by_fingerprint.items())]
    total = ("all", len(held), nbytes)
    _show(result, as_json, ("fingerprint", "entries", "bytes"), [*rows, total])
    if result["old"] and not as_json:
        typer.echo(f"{result['old']} of an older version: nothing reads them, `evict` removes them")
    if quarantined and not as_json:
        typer.echo(f"{len(quarantined)} in {path / 'quarantine'}")


@store_app.command("ls")
def list_chunks(path: StorePath = DEFAULT_STORE, as_json: JsonOption = False) -> None:
    """List stored chunks, least recently used first."""
    with _opened(path) as (store, _):
        held = sorted(store.entries().items(), key=lambda item: item[1].used_at)
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
    with _opened(path) as (store, _), _progress(shown=not as_json) as progress:
        report = store.verify(repair=repair, progress=progress)
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
    with _opened(path) as (store, _):
        if everything and not yes:
            typer.confirm(f"Evict all chunks in {path}?", abort=True, err=True)
        evicted = store.evict_where(condition)
    _show({"path": str(path), "evicted": evicted}, as_json, ("evicted",), [(evicted,)])


@store_app.command()
def gc(
    folder: Annotated[Path, typer.Option("--collection", help="Folder.")] = DEFAULT_FOLDER,
    as_json: JsonOption = False,
) -> None:
    """Remove what a collection's KV holds of no document that it knows; loads its model.

    Two `index` runs over one collection at once, or one that is killed, can leave such KV.
    """
    from cacheblend_rag.engines.factory import EMBEDDED
    from cacheblend_rag.rag.collection import Collection
    from cacheblend_rag.rag.collection_engine import open_known

    with Collection.open(folder) as collection:
        settings = collection.settings
    if settings.engine != EMBEDDED:
        raise StoreError(f"{folder} keeps its KV in vLLM: evict documents or namespaces there")
    with closing(cast("TransformersEngine", open_known(folder, settings, "cpu"))) as engine:
        evicted = engine.evict_unregistered()
    _show({"path": str(folder), "evicted": evicted}, as_json, ("evicted",), [(evicted,)])


def check_is_store(path: Path) -> None:
    """Raise StoreError unless a folder is one that chunk KV was kept in."""
    if not path.is_dir():
        raise StoreError(f"{path} is no folder: give --path or set CACHEBLEND_STORE")
    if (path / FILE_NAME).exists():
        raise StoreError(f"{path} is a collection: its store is --path {path / KV_NAME}")
    if not (path / USAGE_NAME).exists() and not any(path.glob("?/?/*.safetensors")):
        raise StoreError(f"{path} is no store of chunk KV: give --path or set CACHEBLEND_STORE")


def _condition(
    keys: Sequence[str], everything: bool, fingerprint: str | None, older_than: float | None
) -> Callable[[KVKey, Entry], bool]:
    """Return the test for chunks to evict; raises StoreError unless the choice is clear."""
    filtered = fingerprint is not None or older_than is not None
    if bool(keys) + everything + filtered != 1:
        raise StoreError("give keys, or --all, or --fingerprint and --older-than")
    if fingerprint is not None:
        _check_fingerprint(fingerprint)
    named = {_canonical(text) for text in keys}
    oldest = None if older_than is None else time.time() - older_than

    def matches(key: KVKey, entry: Entry) -> bool:
        if everything or named:
            return everything or str(key) in named
        of_fingerprint = fingerprint is None or key.fingerprint == fingerprint
        return of_fingerprint and (oldest is None or entry.written_at < oldest)

    return matches


def _check_fingerprint(text: str) -> None:
    from cacheblend_rag.kv import KVKey, chunk_id

    try:
        KVKey(chunk_id([]), text)
    except ValueError as error:
        raise StoreError(f"{text!r} is no fingerprint: `store stats` prints them") from error


def _canonical(text: str) -> str:
    from cacheblend_rag.kv import KVKey

    try:
        return str(KVKey.parse(text))
    except ValueError as error:
        raise StoreError(f"{text!r} is no KV key: `store ls` prints them") from error


@contextmanager
def _opened(path: Path) -> Iterator[tuple[TieredKVStore, DiskTier]]:
    """Open a store that is there already; raises StoreError when it cannot be used."""
    check_is_store(path)
    from cacheblend_rag.kv import DiskTier, TieredKVStore

    try:
        disk = DiskTier(path)
        with TieredKVStore([disk]) as store:
            yield store, disk
    except OSError as error:
        raise StoreError(f"{path}: {error}") from error


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
