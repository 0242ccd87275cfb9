"""``python -m cacheblend_rag`` and ``cacheblend-rag``: the command line."""

from __future__ import annotations

import sys

from cacheblend_rag.cli.main import app
from cacheblend_rag.engines.quiet_import import is_own_command

QUICK = ("ask", "chat", "explain", "index", "demo", "analyze")
"""The commands that answer from files; those that serve or measure import what others would."""


def main() -> None:
    """Run a command."""
    if any(command in sys.argv for command in QUICK):
        is_own_command()
    app()


if __name__ == "__main__":
    main()
