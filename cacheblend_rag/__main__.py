"""``python -m cacheblend_rag``: the command line."""

from cacheblend_rag.cli.main import app

app()
