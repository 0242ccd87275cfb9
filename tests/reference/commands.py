"""The reference page of the command line, from the commands themselves."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import typer

from cacheblend_rag.cli.main import app

HEAD = """# Commands

After this page you can look up every command and option.

With `--json` a command prints one JSON object on stdout and nothing else there; progress and
warnings go to stderr. Errors are one line, with exit code 2; options, folders, models and URLs are
checked before anything is loaded. `-v` before the command logs, `-v -v` logs more.
`--set NAME=VALUE` gives any [setting](settings.md) by its name.
"""


def commands_page() -> str:
    """Return all commands as a page of Markdown, one section each."""
    return "\n".join([HEAD, *_sections(typer.main.get_command(app), "")])


def _sections(command: Any, name: str) -> Iterator[str]:
    if hasattr(command, "commands"):
        for one in command.commands:
            yield from _sections(command.get_command(None, one), f"{name} {one}".strip())
        return
    context = command.make_context(name, [], resilient_parsing=True)
    usage = " ".join(command.collect_usage_pieces(context))
    about = inspect.cleandoc(command.help or "").split("\n\n")
    yield "\n".join([
        f"## `{name}`", "", f"`cacheblend-rag {name} {usage}`", "",
        *(f"{' '.join(part.split())}\n" for part in about),
        "| | |", "| --- | --- |", *_rows(command, context), "",
    ])  # fmt: skip


def _rows(command: Any, context: Any) -> Iterator[str]:
    for one in command.params:
        if one.name != "help" and (record := one.get_help_record(context)):
            name, text = (part.replace("|", "\\|") for part in record)
            yield f"| `{name}` | {text} |"
