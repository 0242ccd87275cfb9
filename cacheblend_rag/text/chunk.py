"""Chunks, and the documents that they are part of."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cacheblend_rag.errors import ConfigError

BOUNDARY_KEY = "cacheblend_boundary"
"""The metadata field in which frameworks' nodes and documents hold their boundary."""


class Context(Sequence[str]):
    """The pieces of a document before a chunk, in order, as a linked list.

    Each chunk's context is a prefix of the document: copies of them would take memory and time
    quadratic in its length. So a context holds its last piece, the context before that, its length
    and its hash. It equals other contexts and tuples with the same pieces; as a dict key, it only
    finds contexts.
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

    def __getitem__(self, index: Any) -> Any:
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
        """Pickle and copy the pieces as a tuple: the linked list would nest too deep."""
        return Context, (tuple(self),)

    def __repr__(self) -> str:
        return repr(tuple(self))


EMPTY = Context._make(None, "")


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
        object.__setattr__(self, "context", Context(self.context))


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
    separator: str = "\n\n"
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
            found.append(Chunk(text, self.document_id, before, self.collection))
            before = before.then(text).then(self.separator)
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
