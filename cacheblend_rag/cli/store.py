"""``store``: inspects, checks, warms and empties a store of chunk KV."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cacheblend_rag.cli.options import (
    KV_PATH_VARIABLE,
    JsonOption,
    StoreOption,
    finite,
    store_folder,
    store_settings,
)
from cacheblend_rag.cli.output import print_json, print_rows, progress_bar
from cacheblend_rag.errors import StoreError
from cacheblend_rag.progress import Task
from cacheblend_rag.rag.collection import DEFAULT_FOLDER, KV_NAME
from cacheblend_rag.report import Evicted

if TYPE_CHECKING:
    from cacheblend_rag.admin.inspect import OpenStore

store_app = typer.Typer(
    help="Look at, check, warm and empty a store of chunk KV.", no_args_is_help=True
)


DEFAULT_STORE = DEFAULT_FOLDER / KV_NAME

KvPathOption = Annotated[
    Path, typer.Option("--kv-path", envvar=KV_PATH_VARIABLE, help="Folder of chunk KV.")
]
FingerprintOption = Annotated[
    str | None, typer.Option(help="Chunks of this fingerprint: of one model and its settings.")
]
OlderOption = Annotated[
    float | None,
    typer.Option(metavar="SECONDS", min=0, callback=finite, help="Chunks written longer ago."),
]
NewerOption = Annotated[
    float | None,
    typer.Option(metavar="SECONDS", min=0, callback=finite, help="Chunks written since."),
]
NamespaceOption = Annotated[str | None, typer.Option(help="Chunks of this namespace.")]
OfModelOption = Annotated[
    str | None,
    typer.Option("--model", help="Chunks of this model: its folder or its name."),
]
DocumentOption = Annotated[
    str | None, typer.Option(help="Chunks of this document; give its --model, too.")
]
MaxGibOption = Annotated[
    float | None, typer.Option("--max-gib", min=0, callback=finite, help="At most so much.")
]


@store_app.command()
def stats(
    path: KvPathOption = DEFAULT_STORE, store: StoreOption = None, as_json: JsonOption = False
) -> None:
    """Count chunks and bytes, in all, by tier and by fingerprint."""
    with _opened(path, store, read_only=True) as found:
        held = found.count()
    rows = [
        (name, held["of"].get(name, ""), of["entries"], of["bytes"])
        for name, of in sorted(held["fingerprints"].items())
    ]
    rows.append(("all", "", held["entries"], held["bytes"]))
    rows += [(f"{name} tier", "", of["entries"], of["bytes"]) for name, of in held["tiers"].items()]
    _show(held, as_json, ("fingerprint", "of", "entries", "bytes"), rows)
    if held["quarantined"] and not as_json:
        typer.echo(f"{held['quarantined']} in {path / 'quarantine'}")


@store_app.command("ls")
def list_chunks(
    path: KvPathOption = DEFAULT_STORE,
    *,
    store: StoreOption = None,
    fingerprint: FingerprintOption = None,
    older_than: OlderOption = None,
    newer_than: NewerOption = None,
    namespace: NamespaceOption = None,
    model: OfModelOption = None,
    document: DocumentOption = None,
    as_json: JsonOption = False,
) -> None:
    """List stored KV that matches every given condition, least recently used first.

    "of" names the model of chunks, or says that a conversation's turns hold it; it is empty for
    prefixes, and for chunks that vLLM has stored.
    """
    from cacheblend_rag.admin import inspect

    with _opened(path, store, read_only=True) as found:
        choice = inspect.Choice(
            fingerprint, older_than, newer_than, namespace, model=model, document=document
        )
        held, kinds = found.by_use(choice.condition(path)), found.kinds()
    chunks = [
        {
            "key": str(key),
            "of": kinds.get(key.fingerprint),
            "bytes": entry.nbytes,
            "written_at": entry.written_at,
            "used_at": entry.used_at,
        }
        for key, entry in held
    ]
    rows = [
        (
            str(key),
            kinds.get(key.fingerprint, ""),
            entry.nbytes,
            _local_time(entry.written_at),
            _local_time(entry.used_at),
        )
        for key, entry in held
    ]
    columns = ("key", "of", "bytes", "written", "used")
    _show({"path": str(path), "chunks": chunks}, as_json, columns, rows)


@store_app.command()
def verify(
    path: KvPathOption = DEFAULT_STORE,
    store: StoreOption = None,
    as_json: JsonOption = False,
    repair: Annotated[bool, typer.Option("--repair", help="Quarantine what is damaged.")] = False,
) -> None:
    """Read and check every chunk; exits 1 when one is damaged."""
    with _opened(path, store) as opened, _progress("verify", shown=not as_json) as progress:
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
    path: KvPathOption = DEFAULT_STORE,
    store: StoreOption = None,
    everything: Annotated[bool, typer.Option("--all", help="All chunks.")] = False,
    fingerprint: FingerprintOption = None,
    older_than: OlderOption = None,
    newer_than: NewerOption = None,
    namespace: NamespaceOption = None,
    model: OfModelOption = None,
    document: DocumentOption = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask before --all.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Remove chunks: those named, all, or those that match every given condition.

    Chunks that other documents share stay. Documents stay registered: an application removes
    them through its framework, or with `index --prune`.
    """
    from cacheblend_rag.admin import inspect

    with _opened(path, store) as opened:
        choice = inspect.Choice(
            fingerprint, older_than, newer_than, namespace, model, document, spare=True
        )
        if bool(keys) + everything + (not choice.is_open) != 1:
            raise StoreError(
                "give keys, or --all, or some of --document, --namespace, --model, --fingerprint, "
                "--older-than and --newer-than"
            )
        condition = inspect.named(keys) if keys else choice.condition(path)
        if everything and not yes:
            typer.confirm(f"Evict all chunks in {path}?", abort=True, err=True)
        held = opened.store.entries().items()
        doomed = [key for key, entry in held if condition(key, entry)]
        evicted = sum((opened.store.evict(key) for key in doomed), Evicted())
    told = {"path": str(path), "evicted": evicted, "pending": evicted.pending}
    _show(told, as_json, ("evicted",), [(evicted,)])
    if evicted.waiting:
        typer.echo(evicted.waiting, err=True)


@store_app.command("pin")
def pin_document(
    document: Annotated[
        str | None, typer.Argument(help="A document's id; all pins with --undo alone.")
    ] = None,
    *,
    path: KvPathOption = DEFAULT_STORE,
    store: StoreOption = None,
    undo: Annotated[
        bool, typer.Option("--undo", help="Let chunks that were pinned be evicted again.")
    ] = False,
    namespace: NamespaceOption = None,
    model: OfModelOption = None,
    as_json: JsonOption = False,
) -> None:
    """Keep a document's stored chunks from eviction for room and age, in all processes."""
    from cacheblend_rag.admin import inspect

    if document is None and not undo:
        raise StoreError("give a document, or --undo")
    with _opened(path, store) as opened:
        choice = inspect.Choice(document=document, namespace=namespace, model=model)
        done, change = ("unpinned", inspect.unpin) if undo else ("pinned", inspect.pin)
        count = change(opened.store, None if document is None else choice.condition(path))
        elsewhere = inspect.without_pins(opened.store)
    _show({"path": str(path), done: count}, as_json, (done,), [(count,)])
    if elsewhere and not undo:
        typer.echo(
            f"no pins are kept in {', '.join(elsewhere)}: chunks may be evicted there", err=True
        )


@store_app.command()
def warm(
    path: KvPathOption = DEFAULT_STORE,
    *,
    store: StoreOption = None,
    max_gib: MaxGibOption = None,
    namespace: NamespaceOption = None,
    model: OfModelOption = None,
    document: DocumentOption = None,
    as_json: JsonOption = False,
) -> None:
    """Load the most recently used chunks into the fastest tier that outlives this command."""
    from cacheblend_rag.admin import inspect

    with _opened(path, store) as opened, _progress("warm", shown=not as_json) as progress:
        choice = inspect.Choice(namespace=namespace, model=model, document=document)
        keys = inspect.latest_used(opened.store, choice.condition(path))
        most = None if max_gib is None else int(max_gib * (1 << 30))
        done = inspect.warm(opened.store, keys, most, progress)
    _show({"path": str(path), **done}, as_json, tuple(done), [tuple(done.values())])


@contextmanager
def _opened(
    path: Path, given: Sequence[str] | None = None, *, read_only: bool = False
) -> Iterator[OpenStore]:
    """Open a store; raises StoreError if there is none."""
    store_folder(path)
    from cacheblend_rag.admin import inspect

    settings = store_settings(given, read_only=read_only or None)
    with inspect.opened(path, settings) as found:
        yield found


@contextmanager
def _progress(name: str, *, shown: bool) -> Iterator[Callable[[int, int], None]]:
    if not shown:
        yield lambda done, total: None
        return
    with progress_bar() as bar:
        tasks: list[Task] = []

        def advance(done: int, total: int) -> None:
            if not tasks:
                tasks.append(bar.begin(name, total))
            tasks[0].advance()

        yield advance


def _show(
    result: dict[str, Any], as_json: bool, columns: Sequence[str], rows: Sequence[Sequence[object]]
) -> None:
    if as_json:
        print_json(result)
        return
    print_rows(columns, rows)


def _local_time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).isoformat(" ", "seconds")
