"""Hints on their way from a retriever to the chat model, where no argument can carry them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from cacheblend_rag import Chunk

_scope: ContextVar[list[Chunk] | None] = ContextVar("cacheblend_hints", default=None)


@contextmanager
def retrieval_hints() -> Iterator[None]:
    """Let ChatCacheBlend see what CacheBlendCompressor returned within this block.

    Chains run their steps in contexts of their own, so hints need a scope around the whole call::

        with retrieval_hints():
            chain.invoke({"input": question})

    Each task and thread sees its own scope, so requests that run side by side never mix. Without a
    scope passages are still found in the prompt; hints only choose between equal texts of several
    documents, and name passages that were altered on their way.
    """
    token = _scope.set([])
    try:
        yield
    finally:
        _scope.reset(token)


def publish(hints: Iterable[Chunk]) -> None:
    """Add hints to the scope around this call, if there is one."""
    scope = _scope.get()
    if scope is not None:
        scope += hints


def current_hints() -> Sequence[Chunk]:
    """Return the hints of the scope around this call."""
    return tuple(_scope.get() or ())
