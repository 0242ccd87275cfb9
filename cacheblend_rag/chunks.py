"""Chunks and the registry that finds known chunks, verbatim, in any prompt text.

The registry knows each text by one *anchor*: the hash of a window of up to 32 characters in it. A
search hashes every window of the prompt at once, drops almost all of them by a table of marks, and
compares texts only where an anchor stands. A new text takes an anchor that no other text has, where
it can, so texts that share long beginnings or ends stay about as cheap to find as any others.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import overload

import numpy as np
from numpy.typing import NDArray

from cacheblend_rag.errors import PromptError

Hashes = NDArray[np.uint64]
Span = tuple[int, int]

LONGEST_WINDOW = 32
SLOTS_PER_MARK = 32
COMPARED_CHARACTERS = 4 << 20
"""Compared at most in a search, beside some a character of the text; see _Budget."""
COMPARED_PER_CHARACTER = 16
LEAST_COMPARED = 64
CROWD = 64
"""Variants of a text beyond which it says nothing of the document that it stands in."""
SMALLEST_SLOT_BITS = 12
CHARACTER_FACTOR = np.uint64(0x9E3779B97F4A7C15)
WINDOW_FACTORS = (
    np.uint64(0xD6E8FEB86659FD93),
    np.uint64(0xA0761D6478BD642F),
    np.uint64(0xE7037ED1A0B428DB),
    np.uint64(0x8EBC6AF09C88C6E3),
    np.uint64(0x589965CC75374CC3),
)


class Context(Sequence[str]):
    """Pieces of a document, in order. Long ones that begin alike share their beginnings.

    The chunks of a document have its beginnings as contexts: kept apart, they would take memory and
    time by the square of its length. So a context is its last piece and the context before that,
    and knows its length and hash. It equals other contexts and tuples with the same pieces; as a
    key, it finds contexts only.
    """

    __slots__ = ("_hash", "_length", "_parent", "last")

    _hash: int
    _length: int
    _parent: Context | None
    last: str
    """The last piece; "" of an empty context."""

    def __new__(cls, pieces: Iterable[str] = ()) -> Context:
        """Make a context of pieces; a context itself is returned as it is."""
        if isinstance(pieces, Context):
            return pieces
        made = EMPTY
        for piece in pieces:
            made = made.then(piece)
        return made

    @classmethod
    def _make(cls, parent: Context | None, last: str) -> Context:
        made = super().__new__(cls)
        made._parent, made.last = parent, last
        made._length = 0 if parent is None else parent._length + 1
        made._hash = hash((0 if parent is None else parent._hash, last))
        return made

    def then(self, piece: str) -> Context:
        """Return the context with one piece more."""
        return self._make(self, piece)

    @property
    def before(self) -> Context:
        """The context without its last piece; an empty one is itself."""
        return self if self._parent is None else self._parent

    def __len__(self) -> int:
        """Return how many pieces there are."""
        return self._length

    def __reversed__(self) -> Iterator[str]:
        """Yield the pieces from the last to the first."""
        node = self
        while node._parent is not None:
            yield node.last
            node = node._parent

    def __iter__(self) -> Iterator[str]:
        """Yield the pieces in order."""
        return reversed([*reversed(self)])

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[str, ...]: ...

    def __getitem__(self, index: int | slice) -> str | tuple[str, ...]:
        """Return a piece, or several; takes as long as the context is."""
        return tuple(self)[index]

    def __hash__(self) -> int:
        """Return the hash of all pieces, which is known."""
        return self._hash

    def __eq__(self, other: object) -> bool:
        """Tell whether the pieces are the same."""
        if not isinstance(other, Context):
            return tuple(self) == other if isinstance(other, tuple) else NotImplemented
        here, there = self, other
        while here is not there:
            if (here._hash, here._length, here.last) != (there._hash, there._length, there.last):
                return False
            here, there = here.before, there.before
        self._parent = other._parent  # kept once from now on, and compared no more
        return True

    def __reduce__(self) -> tuple[type[Context], tuple[tuple[str, ...]]]:
        """Pickle and copy the pieces: what they hang on would nest too deep."""
        return Context, (tuple(self),)

    def __repr__(self) -> str:
        return repr(tuple(self))


EMPTY = Context._make(None, "")


@dataclass(frozen=True, slots=True)
class Chunk:
    """A passage as indexed.

    text: the passage, verbatim as it will stand in prompts.
    document_id: the document it was cut from, or None when it stands alone.
    context: what precedes it in that document, in pieces, each of which is one tokenization unit
        (an earlier chunk's text or the separator between two chunks). Empty for the first chunk of
        a document and for chunks that stand alone.
    collection: which of several indexes over the same documents it was cut for.
    """

    text: str
    document_id: str | None = None
    context: Sequence[str] = EMPTY
    collection: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "context", Context(self.context))


@dataclass(frozen=True, slots=True)
class Document:
    """A document cut into chunks, in order, joined by ``separator``.

    collection: the index that the chunks are for. Another index over the same documents, cut
    otherwise, needs another one: within a collection, a document's new chunks replace its old ones.
    """

    document_id: str
    chunks: tuple[str, ...]
    separator: str = "\n\n"
    collection: str = ""

    def to_chunks(self) -> list[Chunk]:
        """Return the chunks, each with the pieces of the document that precede it."""
        found: list[Chunk] = []
        before = EMPTY
        for text in self.chunks:
            found.append(Chunk(text, self.document_id, before, self.collection))
            before = before.then(text).then(self.separator)
        return found


@dataclass(frozen=True, slots=True)
class Match:
    """Characters [start, end) of a searched text are ``chunk``'s text."""

    start: int
    end: int
    chunk: Chunk


class ChunkRegistry:
    """All known chunks, found verbatim in any text.

    One text may stand in several documents: each such chunk is a *variant* of it, with a context
    (and so a KV) of its own. Texts are compared character for character; nothing is normalized.
    Safe to search and change from several threads.
    """

    def __init__(self, chunks: Iterable[Chunk] = ()) -> None:
        self._lock = Lock()
        self._serial = 0
        self._variants: dict[str, dict[Chunk, int]] = {}
        self._documents: dict[str | None, dict[str, dict[Chunk, None]]] = {}
        self._anchors: dict[int, _AnchorTable] = {}
        for chunk in chunks:
            self.add(chunk)

    def __len__(self) -> int:
        """Return how many chunks are registered, each variant counted."""
        with self._lock:
            return sum(map(len, self._variants.values()))

    def __contains__(self, text: object) -> bool:
        """Tell whether ``text`` is the text of a registered chunk."""
        with self._lock:
            return text in self._variants

    def add(self, chunk: Chunk) -> None:
        """Register a chunk; one that is known already becomes the most recently added.

        Raises PromptError when its text is empty or only white space.
        """
        self.add_many([chunk])

    def add_many(self, chunks: Iterable[Chunk]) -> None:
        """Register chunks in order; searches may run in between. Raises as ``add``."""
        for chunk in chunks:
            self.check(chunk)
            self._remember(chunk)

    def discard(self, chunk: Chunk) -> None:
        """Forget one chunk, if it is registered; other variants of its text stay."""
        self.discard_many([chunk])

    def discard_many(self, chunks: Iterable[Chunk]) -> None:
        """Forget those of the chunks that are registered."""
        with self._lock:
            for chunk in chunks:
                self._discard(chunk)

    def remove_document(self, document_id: str) -> list[Chunk]:
        """Forget a document's chunks and return them, in the order of their registration."""
        with self._lock:
            chunks = self._chunks_of(document_id)
            for chunk in chunks:
                self._discard(chunk)
            return chunks

    def document(self, document_id: str, collection: str | None = None) -> tuple[Chunk, ...]:
        """Return a document's chunks, in the order of their registration; empty when unknown.

        collection: only those that were cut for it; None is all.
        """
        with self._lock:
            chunks = self._chunks_of(document_id)
        return tuple(c for c in chunks if collection is None or c.collection == collection)

    def chunks(self) -> tuple[Chunk, ...]:
        """Return all registered chunks, each variant by itself."""
        with self._lock:
            return tuple(chunk for variants in self._variants.values() for chunk in variants)

    def refresh(self) -> None:
        """Take in what others wrote, waiting for whoever is writing; nothing to do in memory."""

    def variants(self, text: str) -> tuple[Chunk, ...]:
        """Return the registered chunks with this text, the most recently added last."""
        with self._lock:
            variants = self._variants.get(text, {})
            return tuple(sorted(variants, key=variants.__getitem__))

    def find(self, text: str, hints: Sequence[Chunk | str] = ()) -> list[Match]:
        """Return the registered chunks that stand in ``text``, in order, without overlaps.

        hints: chunks, or document ids, that are expected. The texts of hinted chunks are matched
        first, and so win over any overlapping text that is not hinted. Within the hinted, then
        within the others, the longest text wins, then the leftmost.

        Which variant of a text is returned: a hinted one (an equal chunk, else one of a hinted
        document); then the one whose document, as far as the latest chunks of it found earlier in
        ``text`` show, precedes it here as in its context; then the most recently added.
        """
        windows = list(_windows(text))
        with self._lock:
            hinted = _Hints(hints)
            budget = _Budget(len(text))
            spans = [
                span
                for width, hashes in reversed(windows)
                if width in self._anchors
                for span in self._anchors[width].occurrences(text, hashes, budget)
            ]

            def precedence(span: Span) -> tuple[bool, int, int]:
                start, end = span
                return not self._is_hinted(text[start:end], hinted), start - end, start

            return self._name(text, _without_overlaps(spans, precedence), hinted)

    @staticmethod
    def check(chunk: Chunk) -> None:
        """Raise PromptError when the chunk's text is empty or only white space."""
        if not chunk.text or chunk.text.isspace():
            raise PromptError(
                f"chunk text {chunk.text[:20]!r} of document {chunk.document_id!r} is empty or "
                "only white space; drop such chunks before registering"
            )

    def _add_anchor(self, text: str) -> None:
        *_, (width, hashes) = _windows(text)
        if width not in self._anchors:
            self._anchors[width] = _AnchorTable()
        self._anchors[width].add(text, hashes)

    def _remember(self, chunk: Chunk) -> None:
        with self._lock:
            if chunk.text not in self._variants:
                self._add_anchor(chunk.text)
            self._serial += 1
            self._variants.setdefault(chunk.text, {})[chunk] = self._serial
            texts = self._documents.setdefault(chunk.document_id, {})
            texts.setdefault(chunk.text, {})[chunk] = None

    def _discard(self, chunk: Chunk) -> None:
        variants = self._variants.get(chunk.text, {})
        if chunk not in variants:
            return
        del variants[chunk]
        if not variants:
            del self._variants[chunk.text]
            self._anchors[_window_width(chunk.text)].discard(chunk.text)
        texts = self._documents[chunk.document_id]
        del texts[chunk.text][chunk]
        if not texts[chunk.text]:
            del texts[chunk.text]
        if not texts:
            del self._documents[chunk.document_id]

    def _chunks_of(self, document_id: str) -> list[Chunk]:
        chunks = [c for found in self._documents.get(document_id, {}).values() for c in found]
        return sorted(chunks, key=lambda chunk: self._variants[chunk.text][chunk])

    def _is_hinted(self, text: str, hints: _Hints) -> bool:
        return text in hints.chunks or any(
            text in self._documents.get(document_id, ()) for document_id in hints.document_ids
        )

    def _name(self, text: str, spans: Iterable[Span], hints: _Hints) -> list[Match]:
        matches: list[Match] = []
        earlier: list[str] = []
        for start, end in spans:
            found = text[start:end]
            matches.append(Match(start, end, self._variant(found, earlier, hints)))
            earlier.append(found)
        return matches

    def _variant(self, text: str, earlier: Sequence[str], hints: _Hints) -> Chunk:
        """Choose among the variants of ``text``, the texts in ``earlier`` standing before it."""
        variants = self._variants[text]
        if len(variants) == 1:
            return next(iter(variants))
        candidates = self._hinted_variants(text, hints) or self._related_variants(text, earlier)
        if not candidates or len(candidates) > CROWD:
            return max(candidates or variants, key=variants.__getitem__)
        return max(candidates, key=lambda c: (self._continuity(c, earlier), variants[c]))

    def _hinted_variants(self, text: str, hints: _Hints) -> list[Chunk]:
        same_text = hints.chunks.get(text, [])
        equal = [chunk for chunk in same_text if chunk in self._variants[text]]
        named = hints.document_ids | {chunk.document_id for chunk in same_text}
        return equal or self._variants_in(named, text)

    def _related_variants(self, text: str, earlier: Sequence[str]) -> list[Chunk]:
        """Return the variants that continue a document found in ``earlier``."""
        telling = {other for other in earlier if len(self._variants[other]) <= CROWD}
        found = {chunk.document_id for other in telling for chunk in self._variants[other]}
        candidates = self._variants_in(found, text)
        return [chunk for chunk in candidates if self._continuity(chunk, earlier)]

    def _variants_in(self, document_ids: Iterable[str | None], text: str) -> list[Chunk]:
        return [
            chunk
            for document_id in document_ids
            for chunk in self._documents.get(document_id, {}).get(text, ())
        ]

    def _continuity(self, chunk: Chunk, earlier: Sequence[str]) -> int:
        """Count the chunks that precede ``chunk`` here, without a gap, as in its own document."""
        document = self._documents[chunk.document_id]
        here = (text for text in reversed(earlier) if text in document)
        there = (piece for piece in reversed(chunk.context) if piece in self._variants)
        count = 0
        for text, piece in zip(here, there, strict=False):
            if text != piece:
                break
            count += 1
        return count


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


class _Budget:
    """What a search may compare. Texts of one character repeated would take minutes otherwise.

    A text that is not compared is not found: it costs reuse, never an answer.
    """

    def __init__(self, length: int) -> None:
        self._left = COMPARED_CHARACTERS + COMPARED_PER_CHARACTER * length

    def allows(self, text: str) -> bool:
        """Whether ``text`` may still be compared; counts it."""
        self._left -= max(len(text), LEAST_COMPARED)
        return self._left >= 0


class _AnchorTable:
    """Texts of one window width, each known by the hash of one of its windows."""

    def __init__(self) -> None:
        self._texts: dict[int, list[tuple[int, str]]] = {}
        self._anchor: dict[str, int] = {}
        self._make_room()

    def add(self, text: str, hashes: Hashes) -> None:
        """Register ``text``, whose window hashes are ``hashes``."""
        if self._marked * SLOTS_PER_MARK >= len(self._marks):
            self._make_room()
        offset = self._free_window(hashes)
        anchor = int(hashes[offset])
        self._texts.setdefault(anchor, []).append((offset, text))
        self._anchor[text] = anchor
        self._mark(hashes[offset : offset + 1])

    def discard(self, text: str) -> None:
        """Forget ``text``. Its mark stays until room is made: it costs time, never a match."""
        anchor = self._anchor.pop(text)
        kept = [entry for entry in self._texts[anchor] if entry[1] != text]
        if kept:
            self._texts[anchor] = kept
        else:
            del self._texts[anchor]

    def occurrences(self, text: str, hashes: Hashes, budget: _Budget) -> Iterator[Span]:
        """Yield where registered texts stand in ``text``, overlaps included, within ``budget``."""
        marked = np.flatnonzero(self._marks[self._slots(hashes)])
        for position, anchor in zip(marked.tolist(), hashes[marked].tolist(), strict=True):
            for offset, known in self._texts.get(anchor, ()):
                start = position - offset
                if not budget.allows(known):
                    return
                if start >= 0 and text.startswith(known, start):
                    yield start, start + len(known)

    def _free_window(self, hashes: Hashes) -> int:
        """Choose an anchor: an unmarked window at or after the middle, else before it.

        From the middle, because texts cut by one rule tend to begin and end alike.
        """
        middle = len(hashes) // 2
        free = ~self._marks[self._slots(hashes)]
        for first, part in ((middle, free[middle:]), (0, free[:middle])):
            if part.any():
                return first + int(part.argmax())
        anchors: list[int] = hashes.tolist()
        crowds = {anchor: len(self._texts.get(anchor, ())) for anchor in anchors}
        return anchors.index(min(crowds, key=crowds.__getitem__))

    def _slots(self, hashes: Hashes) -> NDArray[np.int64]:
        slots: NDArray[np.int64] = (hashes >> self._shift).view(np.int64)
        return slots

    def _mark(self, hashes: Hashes) -> None:
        self._marks[self._slots(hashes)] = True
        self._marked += len(hashes)

    def _make_room(self) -> None:
        """Lay the marks anew with room for twice the texts known now; stale marks go."""
        slots = 2 * SLOTS_PER_MARK * len(self._texts)
        bits = max(SMALLEST_SLOT_BITS, slots.bit_length())
        self._shift = np.uint64(64 - bits)
        self._marks = np.zeros(1 << bits, dtype=np.bool_)
        self._marked = 0
        self._mark(np.fromiter(self._texts, dtype=np.uint64, count=len(self._texts)))


def _window_width(text: str) -> int:
    """Return the largest power of two that fits in ``text``, at most LONGEST_WINDOW."""
    return min(LONGEST_WINDOW, 1 << (len(text).bit_length() - 1))


def _windows(text: str) -> Iterator[tuple[int, Hashes]]:
    """Yield (width, hashes of all windows of that width) for widths 1, 2, 4, ... that fit."""
    if not text:
        return
    # UTF-32 holds one number a character; surrogatepass because a text may hold unpaired ones.
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")
    hashes = codes.astype(np.uint64) * CHARACTER_FACTOR
    width = 1
    yield width, hashes
    for factor in WINDOW_FACTORS:
        if len(hashes) <= width:
            return
        hashes = hashes[:-width] * factor + hashes[width:]
        width *= 2
        yield width, hashes


def _without_overlaps(
    spans: Iterable[Span], precedence: Callable[[Span], tuple[bool, int, int]]
) -> list[Span]:
    """Keep spans by precedence, none overlapping one kept before; return them in order."""
    kept: list[Span] = []
    for span in sorted(spans, key=precedence):
        start, end = span
        after = bisect_left(kept, span)
        clear_before = after == 0 or kept[after - 1][1] <= start
        if clear_before and (after == len(kept) or end <= kept[after][0]):
            insort(kept, span)
    return kept
