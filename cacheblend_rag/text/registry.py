"""ChunkRegistry: finds known chunks, verbatim, in any prompt text."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from threading import Lock
from typing import Any, TypeAlias

from cacheblend_rag.errors import PromptError
from cacheblend_rag.text.chunk import Chunk, Match, stands_before
from cacheblend_rag.text.search import (
    AnchorTable,
    SearchBudget,
    Span,
    codes_of,
    windows,
    without_overlaps,
)

Numbered: TypeAlias = dict[Chunk, int]
"""Chunks, each with a number that grows with every registration."""

CROWD = 64
"""A text with more variants than this does not identify the document that it occurs in."""


class ChunkRegistry:
    """All known chunks, found verbatim in any text.

    One text may occur in several documents: each such chunk is a *variant* of it, with its own
    context (and so its own KV). Texts are compared character for character; nothing is normalized.
    Safe to search and change from several threads.

    Args:
        chunks: the initial chunks.
    """

    def __init__(self, chunks: Iterable[Chunk] = ()) -> None:
        self._lock = Lock()
        self._serial = 0
        self._generation = object()
        # Each index has its chunks in the order of their serial numbers.
        self._variants: dict[str, Numbered] = {}
        self._documents: dict[str | None, Numbered] = {}
        self._of_documents: dict[tuple[str | None, str], Numbered] = {}
        self._anchors: dict[int, AnchorTable] = {}
        ChunkRegistry.add_many(self, chunks)

    def __len__(self) -> int:
        """Return how many chunks are registered, each variant counted."""
        self._catch_up()
        with self._lock:
            return sum(map(len, self._variants.values()))

    def __contains__(self, text: object) -> bool:
        """Return whether ``text`` is the text of a registered chunk."""
        self._catch_up()
        with self._lock:
            return text in self._variants

    @property
    def generation(self) -> object:
        """An object that is replaced with each chunk that is added or forgotten.

        While it stays the same, searches of the same text find the same chunks.
        """
        self._catch_up()
        return self._generation

    def add_many(self, chunks: Iterable[Chunk]) -> None:
        """Register chunks in order; one that is known already becomes the most recently added.

        Searches may run in between.

        Raises:
            PromptError: when a text is empty or only white space.
        """
        for chunk in chunks:
            check_text(chunk)
            with self._lock:
                self._add(chunk)

    def discard_many(self, chunks: Iterable[Chunk]) -> None:
        """Remove chunks; unknown ones are ignored. Equal texts of other documents stay."""
        with self._lock:
            for chunk in chunks:
                self._discard(chunk)

    def document(self, document_id: str, collection: str | None = None) -> tuple[Chunk, ...]:
        """Return a document's chunks, in the order of their registration; empty when unknown.

        Args:
            document_id: the document.
            collection: only chunks of this collection; None is all.
        """
        self._catch_up()
        with self._lock:
            chunks = tuple(self._documents.get(document_id, ()))
        return tuple(c for c in chunks if collection is None or c.collection == collection)

    def chunks(self) -> tuple[Chunk, ...]:
        """Return all registered chunks, each variant by itself."""
        self._catch_up()
        with self._lock:
            return tuple(chunk for variants in self._variants.values() for chunk in variants)

    def watch(self, removed: Callable[[Sequence[Chunk]], None]) -> None:
        """Call a function with chunks that other processes forget; never happens in memory.

        Args:
            removed: called with the forgotten chunks, when changes by other processes are read;
                it must not raise.
        """

    def refresh(self) -> None:
        """Read changes by other processes, waiting for a writer; does nothing in memory."""

    def variants(self, text: str) -> tuple[Chunk, ...]:
        """Return the registered chunks with this text, the most recently added last."""
        self._catch_up()
        with self._lock:
            return tuple(self._variants.get(text, ()))

    def find(self, text: str, hints: Sequence[Chunk | str] = ()) -> list[Match]:
        """Return the registered chunks in ``text``, in order, without overlaps.

        The texts of hinted chunks are matched first, and so win over any overlapping text that is
        not hinted. Within the hinted, then within the others, the longest text wins, then the
        leftmost.

        Of several variants of a text, the hints choose (an equal chunk, else those of hinted
        documents), then the chunks found before it in ``text``: the variant whose whole context
        they are, the longest one. If variants with different contexts are left, the chunk without
        context is returned, even if it is not registered itself: what one document holds never
        answers for another.

        Args:
            text: the text to search.
            hints: chunks, or document ids, that are expected.
        """
        self._catch_up()
        found, hinted = list(windows(codes_of(text))), _Hints(hints)
        with self._lock:
            budget = SearchBudget(len(text))
            spans = [
                span
                for width, hashes in reversed(found)
                if width in self._anchors
                for span in self._anchors[width].occurrences(text, hashes, budget)
            ]

            def precedence(span: Span) -> tuple[bool, int, int]:
                start, end = span
                return not self._is_hinted(text[start:end], hinted), start - end, start

            matches: list[Match] = []
            earlier: list[str] = []
            for start, end in without_overlaps(spans, precedence):
                chunk = self._variant(text[start:end], earlier, hinted)
                matches.append(Match(start, end, chunk))
                earlier.append(chunk.text)
            return matches

    def _catch_up(self) -> None:
        """Read what other processes changed; does nothing in memory."""

    def _add(self, chunk: Chunk) -> None:
        if chunk.text not in self._variants:
            *_, (width, hashes) = windows(codes_of(chunk.text))
            self._anchors.setdefault(width, AnchorTable()).add(chunk.text, hashes)
        self._serial += 1
        self._generation = object()
        for index, key in self._entries(chunk):
            chunks = index.setdefault(key, {})
            chunks.pop(chunk, None)
            chunks[chunk] = self._serial

    def _discard(self, chunk: Chunk) -> None:
        if chunk not in self._variants.get(chunk.text, ()):
            return
        self._generation = object()
        for index, key in self._entries(chunk):
            del index[key][chunk]
            if not index[key]:
                del index[key]
        if chunk.text not in self._variants:
            *_, (width, hashes) = windows(codes_of(chunk.text))
            self._anchors[width].discard(chunk.text, hashes)

    def _entries(self, chunk: Chunk) -> Iterator[tuple[dict[Any, Numbered], Any]]:
        """Yield each index, with the key under which it has a chunk."""
        yield self._variants, chunk.text
        yield self._documents, chunk.document_id
        yield self._of_documents, (chunk.document_id, chunk.text)

    def _is_hinted(self, text: str, hints: _Hints) -> bool:
        return text in hints.chunks or any(
            (document_id, text) in self._of_documents for document_id in hints.document_ids
        )

    def _variant(self, text: str, earlier: Sequence[str], hints: _Hints) -> Chunk:
        """Choose among the variants of ``text``; ``earlier``: the chunk texts before it."""
        variants = self._variants[text]
        hinted = self._hinted_variants(text, hints)
        related = hinted
        if not hinted:  # those in a document that was found before
            telling = {other for other in earlier if len(self._variants[other]) <= CROWD}
            shown = {one.document_id for other in telling for one in self._variants[other]}
            related = self._variants_in(shown, text)
        if len(related) <= CROWD and (
            confirmed := [c for c in related if stands_before(c.context, earlier)]
        ):
            return max(confirmed, key=lambda c: (len(c.context), variants[c]))
        left = sorted(hinted, key=variants.__getitem__) or variants
        if not differ(left):
            return next(reversed(left))
        bare = [c for c in left if not c.context] if len(left) <= CROWD else []
        return bare[-1] if bare else Chunk(text)

    def _hinted_variants(self, text: str, hints: _Hints) -> list[Chunk]:
        same_text = hints.chunks.get(text, [])
        equal = [chunk for chunk in same_text if chunk in self._variants[text]]
        named = hints.document_ids | {chunk.document_id for chunk in same_text}
        return equal or self._variants_in(named, text)

    def _variants_in(self, document_ids: Iterable[str | None], text: str) -> list[Chunk]:
        return [
            chunk
            for document_id in document_ids
            for chunk in self._of_documents.get((document_id, text), ())
        ]


def check_text(chunk: Chunk) -> None:
    """Refuse a chunk that cannot be searched for.

    Raises:
        PromptError: when the chunk's text is empty or only white space.
    """
    if not chunk.text or chunk.text.isspace():
        raise PromptError(
            f"chunk text {chunk.text[:20]!r} of document {chunk.document_id!r} is empty or only "
            "white space; drop such chunks before registering"
        )


def differ(variants: Collection[Chunk]) -> bool:
    """Whether variants of a text have different contexts, hence different contextual KV."""
    contexts = (chunk.context for chunk in variants)
    first = next(contexts, ())
    return any(context != first for context in contexts)


class _Hints:
    """Hints sorted by kind: chunks under their texts, and document ids."""

    def __init__(self, hints: Sequence[Chunk | str]) -> None:
        self.chunks: dict[str, list[Chunk]] = {}
        self.document_ids: set[str | None] = set()
        for hint in [hints] if isinstance(hints, str) else hints:
            if isinstance(hint, Chunk):
                self.chunks.setdefault(hint.text, []).append(hint)
            else:
                self.document_ids.add(hint)
