"""``settings``: print all settings as a page, or their JSON schema."""

from __future__ import annotations

from typing import Annotated

import typer

from cacheblend_rag.cli.output import print_json


def settings_command(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the JSON schema on stdout and nothing else there.")
    ] = False,
) -> None:
    """Print every setting with its type and default, as docs/settings.md; or their JSON schema."""
    from cacheblend_rag.observe.settings_schema import settings_page, settings_schema

    if as_json:
        print_json(settings_schema())
    else:
        typer.echo(settings_page(), nl=False)
