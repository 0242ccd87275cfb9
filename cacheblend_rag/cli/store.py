"""``store``: looks at, checks, pins, empties and copies a store of chunk KV."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cacheblend_rag.cli.named_settings import named
from cacheblend_rag.cli.options import KV_PATH_VARIABLE, JsonOption
from cacheblend_rag.cli.output import print_json, print_rows, progress_bar
from cacheblend_rag.errors import StoreError
from cacheblend_rag.progress import ProgressCallbacks
from cacheblend_rag.rag import DEFAULT_FOLDER, FILE_NAME, KV_NAME
from cacheblend_rag.report import Evicted

if TYPE_CHECKING:
    from cacheblend_rag.admin.inspect import Choice, OpenStore

store_app = typer.Typer(
    help="Look at, check, pin, empty and copy a store of chunk KV.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
StoreArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="STORE",
        help="A folder of chunk KV, or the URLs of tiers; a folder beside URLs has the records.",
        show_default=f"{KV_PATH_VARIABLE}, or {DEFAULT_FOLDER / KV_NAME}",
    ),
]
OnlyOption = Annotated[
    list[str] | None,
    typer.Option(
        "--only",
        metavar="NAME=VALUE",
        help="Chunks of one namespace, model, document (with its model), fingerprint or key, or "
        "older_than or newer_than a time, such as 12h. Repeatable.",
    ),
]


@store_app.command()
def stats(places: StoreArgument = None, as_json: JsonOption = False) -> None:
    """Count chunks and bytes, in all, by tier and by fingerprint."""
    with _opened(places, read_only=True) as found:
        held = found.count()
    rows = [
        (name, held["models"].get(name, ""), of["entries"], of["bytes"])
        for name, of in sorted(held["fingerprints"].items())
    ]
    rows.append(("all", "", held["entries"], held["bytes"]))
    rows += [(f"{name} tier", "", of["entries"], of["bytes"]) for name, of in held["tiers"].items()]
    _show(held, as_json, ("fingerprint", "model", "entries", "bytes"), rows)
    if held["quarantined"] and not as_json:
        typer.echo(f"{held['quarantined']} in quarantine/")


@store_app.command("ls")
def list_chunks(
    places: StoreArgument = None, only: OnlyOption = None, as_json: JsonOption = False
) -> None:
    """List stored KV that matches every condition, least recently used first.

    The model is that of chunks; of prefixes and turns, and of what vLLM stored, it is not known.
    """
    with _opened(places, read_only=True) as found:
        held, models = found.by_use(_choice(only)), found.count()["models"]
    chunks = [
        {
            "key": str(key),
            "model": models.get(key.fingerprint),
            "bytes": entry.nbytes,
            "written_at": entry.written_at,
            "used_at": entry.used_at,
        }
        for key, entry in held
    ]
    rows = [
        (one["key"], one["model"] or "", one["bytes"], *(_time(of.written_at), _time(of.used_at)))
        for one, (_, of) in zip(chunks, held, strict=True)
    ]
    columns = ("key", "model", "bytes", "written", "used")
    _show({"path": found.place, "chunks": chunks}, as_json, columns, rows)


@store_app.command()
def verify(
    places: StoreArgument = None,
    repair: Annotated[bool, typer.Option("--repair", help="Quarantine what is damaged.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Read and check every chunk; exits 1 when one is damaged."""
    with _opened(places) as opened, progress_bar() as bar:
        report = opened.store.verify(repair=repair, progress=_progress(bar, "verify"))
    damaged = [{"key": str(found.key), "reason": found.reason} for found in report.damaged]
    result = {
        "path": opened.place,
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
    places: StoreArgument = None,
    only: OnlyOption = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask before all go.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Remove the chunks that match every condition, or all.

    Chunks that other documents share stay. Documents stay registered: an application removes
    them through its framework, or with `index --prune`.
    """
    choice = _choice(only)
    with _opened(places) as opened:
        if not (choice.given() or yes):
            typer.confirm(f"Evict all chunks in {opened.place}?", abort=True, err=True)
        doomed = [key for key, _ in opened.by_use(choice, spare=True)]
        evicted = sum((opened.store.evict(key) for key in doomed), Evicted())
    told = {"path": opened.place, "evicted": evicted, "pending": evicted.pending}
    _show(told, as_json, ("evicted",), [(evicted,)])
    if evicted.waiting:
        typer.echo(evicted.waiting, err=True)


@store_app.command("pin")
def pin_chunks(
    places: StoreArgument = None,
    only: OnlyOption = None,
    undo: Annotated[
        bool, typer.Option("--undo", help="Let them be evicted again; all without a condition.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Keep stored chunks from eviction for room and age, in all processes."""
    choice = _choice(only)
    if not (choice.given() or undo):
        raise StoreError("give --only document=ID and --only model=NAME, or --undo")
    with _opened(places) as opened:
        done, change = ("unpinned", opened.unpin) if undo else ("pinned", opened.pin)
        count, elsewhere = change(choice), opened.without_pins()
    _show({"path": opened.place, done: count}, as_json, (done,), [(count,)])
    if elsewhere and not undo:
        typer.echo(
            f"no pins are kept in {', '.join(elsewhere)}: chunks may be evicted there", err=True
        )


@store_app.command()
def copy(
    source: Annotated[str, typer.Argument(metavar="FROM", help="A folder or a tier's URL.")],
    target: Annotated[
        str, typer.Argument(metavar="TO", help="Another; disk:///folder?capacity=8GiB is bounded.")
    ],
    only: OnlyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Copy chunks between tiers, the most recently used first; exits 1 when one failed."""
    from cacheblend_rag.admin import inspect

    with progress_bar() as bar:
        progress = _progress(bar, "copy")
        done = inspect.copy(_place(source), _place(target), _choice(only), progress)
    _show(done, as_json, tuple(done), [tuple(done.values())])
    if done["failed"]:
        raise typer.Exit(1)


def _choice(only: Sequence[str] | None) -> Choice:
    from cacheblend_rag.admin.inspect import Choice

    return Choice(**named(only, Choice, option="--only"))


def _place(place: str) -> str:
    """Return a place; of a collection's folder its store."""
    is_collection = "://" not in place and (Path(place) / FILE_NAME).exists()
    return str(Path(place) / KV_NAME) if is_collection else place


@contextmanager
def _opened(places: Sequence[str] | None, *, read_only: bool = False) -> Iterator[OpenStore]:
    from cacheblend_rag.admin import inspect

    default = os.environ.get(KV_PATH_VARIABLE) or str(DEFAULT_FOLDER / KV_NAME)
    with inspect.opened([*map(_place, places or [default])], read_only=read_only) as found:
        yield found


def _progress(bar: ProgressCallbacks, name: str) -> Callable[[int, int], None]:
    """Return what shows the steps of a task, which begins with the first."""
    begin = cache(lambda total: bar.begin(name, total))
    return lambda done, total: begin(total).advance()


def _show(
    result: dict[str, Any], as_json: bool, columns: Sequence[str], rows: Sequence[Sequence[object]]
) -> None:
    if as_json:
        print_json(result)
    else:
        print_rows(columns, rows)


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).isoformat(" ", "seconds")
