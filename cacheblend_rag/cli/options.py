"""Options shared by several commands, and parsers of their values."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from cacheblend_rag.errors import ConfigError, ModelLoadError, PromptError, StoreError
from cacheblend_rag.models import LOCAL_MODELS, check, is_local
from cacheblend_rag.rag import FILE_NAME, KV_NAME

ModelOption = Annotated[
    str,
    typer.Option("--model", help=f"{LOCAL_MODELS}."),
]
EngineOption = Annotated[
    str | None,
    typer.Option(
        "--engine",
        help="'transformers', 'vllm' or the URL of a `serve`; CACHEBLEND_API_KEY is its key.",
    ),
]
JsonOption = Annotated[
    bool,
    typer.Option("--json", help="Print one JSON object on stdout and nothing else there."),
]

KV_PATH_VARIABLE = "CACHEBLEND_KV_PATH"
"""Names the folder of chunk KV where no ``--kv-path`` does."""


def refuse(context: typer.Context, names: Iterable[str], why: str) -> None:
    """Raise ConfigError for one of these parameters that is given on the command line."""
    flags = {one.name: one.opts[0] for one in context.command.params}
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            flag = flags[name] if flags[name].startswith("-") else name.upper()
            raise ConfigError(f"{flag}: {why}")


def local_model(name: str) -> str:
    """Return the name of a model on this machine; raises ModelLoadError if it is not there."""
    if not is_local(name):
        raise ModelLoadError(f"model={name!r}: there is no such folder; give {LOCAL_MODELS}")
    check(name)
    return name


def store_folder(path: Path) -> Path:
    """Let a folder through unless it is a collection's; raises StoreError, naming its store."""
    if (path / FILE_NAME).exists():
        raise StoreError(f"{path} is a collection: its store is {path / KV_NAME}")
    return path


def read_text(path: Path, option: str) -> str:
    """Return the text of an option's file; raises PromptError if it cannot be read."""
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it holds other bytes"
        raise PromptError(f"{option} {path} cannot be read as UTF-8 text: {why}") from error
