"""Calls a function for many chunks, on several threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from cacheblend_rag.kv.chunk_kv import KVKey
from cacheblend_rag.openmp import use_one_thread

T = TypeVar("T")


def in_parallel(do: Callable[[KVKey], T], keys: Sequence[KVKey], threads: int) -> list[T]:
    """Return the results of ``do`` for all keys, in their order, computed on so many threads."""
    threads = min(threads, len(keys))
    if threads <= 1:
        return [do(key) for key in keys]
    with ThreadPoolExecutor(threads, "kv-tier", initializer=use_one_thread) as pool:
        return list(pool.map(do, keys))
