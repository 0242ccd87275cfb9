"""Settings of cut data: which chunks of a question's documents are retrieved, in what order.

- ``adjacent``: whole documents, one after another, their chunks in order.
- ``fragments``: some chunks of each document, in order, but not its first one, which tells what the
  document is about.
- ``shuffled``: all chunks in random order.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.text.chunk import Chunk, Document

ADJACENT, FRAGMENTS, SHUFFLED = "adjacent", "fragments", "shuffled"
Retrieve = Callable[[Sequence[Document], Collection[Chunk], random.Random], list[Chunk]]
"""Takes documents, their chunks that hold the answer, and a source of random numbers."""


def retrieve_adjacent(
    documents: Sequence[Document], gold: Collection[Chunk], rng: random.Random
) -> list[Chunk]:
    """Return all chunks in order."""
    return [chunk for document in documents for chunk in document.to_chunks()]


def retrieve_fragments(
    documents: Sequence[Document], gold: Collection[Chunk], rng: random.Random
) -> list[Chunk]:
    """Return some later chunks of each document, gold ones always.

    Where a document has only one chunk, this is returned.
    """
    found: list[Chunk] = []
    for document in documents:
        chunks = document.to_chunks()
        later = chunks[1:] or chunks
        drawn = rng.sample(later, rng.randint(1, len(later)))
        found += [chunk for chunk in later if chunk in drawn or chunk in gold]
    return found


def retrieve_shuffled(
    documents: Sequence[Document], gold: Collection[Chunk], rng: random.Random
) -> list[Chunk]:
    """Return all chunks in random order."""
    found = retrieve_adjacent(documents, gold, rng)
    rng.shuffle(found)
    return found


RETRIEVAL: dict[str, Retrieve] = {
    ADJACENT: retrieve_adjacent,
    FRAGMENTS: retrieve_fragments,
    SHUFFLED: retrieve_shuffled,
}
CUT_SETTINGS = tuple(RETRIEVAL)


def retrieval(setting: str) -> Retrieve:
    """Return the function that retrieves chunks in a setting; raises ConfigError."""
    if setting not in RETRIEVAL:
        raise ConfigError(f"setting={setting!r} must be one of {', '.join(RETRIEVAL)}")
    return RETRIEVAL[setting]
