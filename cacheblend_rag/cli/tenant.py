"""``tenant``: make the keys of a tenant of a server."""

from __future__ import annotations

from typing import Annotated

import typer

from cacheblend_rag.cli import output
from cacheblend_rag.engines.vllm.middleware.tenants import new_entry


def tenant_command(
    namespace: Annotated[str, typer.Argument(help="The tenant's namespace, a name.")],
) -> None:
    """Make two keys for a tenant, and print their entry in the file of `serve --tenants`.

    The keys go to the terminal (stderr), this once; the entry, on stdout, has their hashes only.
    """
    ask, store, entry = new_entry(namespace)
    output.tell(f"key to ask: {ask}")
    output.tell(f"key to ask and store: {store}")
    typer.echo(entry)
