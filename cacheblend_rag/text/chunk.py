"""Chunks, and the documents that they are part of."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from hashlib import blake2b
from typing import Any

from cacheblend_rag.errors import ConfigError

BOUNDARY_KEY = "cacheblend_boundary"
"""The metadata field in which frameworks' nodes and documents hold their boundary."""
DIGEST_BYTES = 16
SEPARATOR = "\n\n"
"""The text between two passages, or two texts of one message."""


class Context(Sequence[str]):
    """The text before a chunk in its document, as a sequence of pieces (chunks and separators).

    Each chunk's context is a prefix of the document: copies of them would take memory and time
    quadratic in its length. So a context holds its last piece and the context before that. It
    equals contexts with the same pieces, of which it compares digests, and tuples of them; as a
    dict key, it only finds contexts.

    Attributes:
        before: the context without its last piece; an empty one is itself.
        last: the last piece; "" of an empty context.
        digest: 16 bytes that no other pieces have.
    """

    __slots__ = ("_length", "before", "digest", "last")

    before: Context
    last: str
    digest: bytes

    def __init__(self, before: Context | None = None, last: str = "") -> None:
        self.last = last
        if before is None:
            self.before, self._length, self.digest = self, 0, bytes(DIGEST_BYTES)
            return
        self.before, self._length = before, len(before) + 1
        told = before.digest + last.encode("utf-8", "surrogatepass")
        self.digest = blake2b(told, digest_size=DIGEST_BYTES).digest()

    @classmethod
    def of(cls, pieces: Iterable[str]) -> Context:
        """Return a context of these pieces; a Context is returned unchanged."""
        return pieces if isinstance(pieces, Context) else reduce(cls, pieces, EMPTY)

    def then(self, piece: str) -> Context:
        """Return the context with one piece more."""
        return Context(self, piece)

    def __len__(self) -> int:
        """Return how many pieces there are."""
        return self._length

    def __reversed__(self) -> Iterator[str]:
        """Yield the pieces from the last to the first."""
        context = self
        while context:
            yield context.last
            context = context.before

    def __iter__(self) -> Iterator[str]:
        """Yield the pieces in order."""
        return reversed([*reversed(self)])

    def __getitem__(self, index: Any) -> Any:
        """Return a piece, or several; takes as long as the context is."""
        return tuple(self)[index]

    def __hash__(self) -> int:
        """Return a hash of all pieces."""
        return hash(self.digest)

    def __eq__(self, other: object) -> bool:
        """Tell whether the pieces are the same."""
        if isinstance(other, Context):
            return self.digest == other.digest
        return tuple(self) == other if isinstance(other, tuple) else NotImplemented

    def __reduce__(self) -> tuple[Callable[[Iterable[str]], Context], tuple[tuple[str, ...]]]:
        """Pickle and copy as a tuple of pieces: nested ones would exceed the recursion limit."""
        return Context.of, (tuple(self),)

    def __repr__(self) -> str:
        return repr(tuple(self))


EMPTY = Context()


@dataclass(frozen=True, slots=True)
class Chunk:
    """A passage as indexed.

    Args:
        text: the passage, verbatim as in prompts.
        document_id: the document it was cut from, or None when it stands alone.
        context: the text before it in that document, in pieces, each of which is one tokenization
            unit (an earlier chunk's text or the separator between two chunks). Empty for the first
            chunk of a document and for chunks that stand alone. The chunk's KV depends on all of
            it, so it must hold nothing that a reader of the chunk may not see.
        collection: the index it belongs to, if several indexes hold the same documents.
    """

    text: str
    document_id: str | None = None
    context: Sequence[str] = EMPTY
    collection: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "context", Context.of(self.context))

    @property
    def passage(self) -> Context:
        """Its context and its text: all that stands in its document up to its end."""
        return Context.of(self.context).then(self.text)


@dataclass(frozen=True, slots=True)
class Document:
    """A document cut into chunks.

    Args:
        document_id: the document's unique name.
        chunks: its texts, in order.
        separator: the text between two chunks.
        collection: the index that the chunks belong to. Another index over the same documents,
            split differently, needs another collection: within one, a document's new chunks
            replace its old ones.
        boundaries: for each chunk a text that identifies its readers; empty if all readers may see
            all chunks. A chunk's context ends where this changes: its KV does not depend on the
            text beyond.

    Raises:
        ConfigError: when there are boundaries, but not one for each chunk.
    """

    document_id: str
    chunks: tuple[str, ...]
    separator: str = SEPARATOR
    collection: str = ""
    boundaries: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.boundaries and len(self.boundaries) != len(self.chunks):
            raise ConfigError(
                f"document {self.document_id!r} has {len(self.boundaries)} boundaries for "
                f"{len(self.chunks)} chunks: give one for each chunk, or none"
            )
        if not any(self.boundaries):
            object.__setattr__(self, "boundaries", ())

    def to_chunks(self) -> list[Chunk]:
        """Return the chunks, each with the pieces that precede it within its boundary."""
        found: list[Chunk] = []
        before, within = EMPTY, ""
        boundaries = self.boundaries or [""] * len(self.chunks)
        for text, boundary in zip(self.chunks, boundaries, strict=True):
            if boundary != within:
                before, within = EMPTY, boundary
            chunk = Chunk(text, self.document_id, before, self.collection)
            before = chunk.passage.then(self.separator)
            found.append(chunk)
        return found


@dataclass(frozen=True, slots=True)
class Match:
    """Characters [start, end) of a searched text are ``chunk``'s text."""

    start: int
    end: int
    chunk: Chunk


def stands_before(context: Sequence[str], earlier: Sequence[str]) -> bool:
    """Whether the last texts of ``earlier`` are all pieces of a context, in order; of () they are.

    Pieces of white space do not count: a prompt may separate passages otherwise.
    """
    before = reversed(earlier)
    return all(piece == next(before, None) for piece in reversed(context) if piece.strip())


def read_boundary(metadata: Mapping[str, Any]) -> str:
    """Return the boundary in a node's metadata, "" if there is none.

    Any JSON value is allowed; the order of a list of groups does not matter.
    """
    told = metadata.get(BOUNDARY_KEY)
    if told is None or isinstance(told, str):
        return told or ""
    if isinstance(told, list | tuple | set | frozenset):
        told = sorted(map(str, told))
    return json.dumps(told, sort_keys=True, default=str)


def read_hints(given: Chunk | str | Iterable[Chunk | str]) -> tuple[Chunk | str, ...]:
    """Return hints as a tuple; a single hint needs no list.

    Raises:
        ConfigError: for a hint that is neither a chunk nor a document's id.
    """
    hints = given if isinstance(given, list | tuple) else (given,)
    for hint in hints:
        if not isinstance(hint, str | Chunk):
            raise ConfigError(f"hints hold a {type(hint).__name__}: give Chunks or document ids")
    return tuple(hints)
