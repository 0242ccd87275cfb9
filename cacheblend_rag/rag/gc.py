"""Garbage collection: evicts a collection's KV that belongs to none of its documents."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from cacheblend_rag.errors import StoreError
from cacheblend_rag.rag.collection import Collection
from cacheblend_rag.rag.collection_engine import Placement, open_known
from cacheblend_rag.settings import EMBEDDED


def evict_unregistered(folder: Path) -> int:
    """Load a collection's model and evict KV of unregistered chunks; returns how many.

    Raises StoreError when its KV is in vLLM, and the errors of opening the collection.
    """
    with Collection.open(folder) as collection:
        settings = collection.settings
    if settings.engine != EMBEDDED:
        raise StoreError(f"{folder} keeps its KV in vLLM: evict documents or namespaces there")
    with closing(open_known(folder, settings, Placement("cpu"))) as engine:
        return engine.evict_unregistered()
