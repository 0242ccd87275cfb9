"""``python -m cacheblend_rag`` and ``cacheblend-rag``: the command line."""

from __future__ import annotations

from cacheblend_rag.cli.main import app


def main() -> None:
    """Run a command."""
    app()


if __name__ == "__main__":
    main()
