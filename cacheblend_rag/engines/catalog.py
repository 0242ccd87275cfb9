"""The catalogue of a store: the tokens of its chunks, whether or not their KV is there just now.

A record holds chunks that were precomputed together. It is named by the hash of its content, so
writing it twice makes no difference, and it is never changed: of chunks that are left of it, there
is a new record. The servers of a store keep records beside its KV (catalog_places.py), and look
for those of others. Nothing that was kept is trusted: a record's name must be the hash of its
content, its digest must be right, under the store's key if there is one (kv/mac.py), and its values
must be hashes and known names. What is found by it is still looked up in the store, whose KV has
checks of its own.
"""

from __future__ import annotations

import hashlib
import logging
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from cacheblend_rag.engines.catalog_places import Place
from cacheblend_rag.kv.mac import Mac
from cacheblend_rag.kv.tiers.breaker import Breaker
from cacheblend_rag.prefill.lead_in import LeadInId, MaybeHash
from cacheblend_rag.text.token_index import TokenIndex

logger = logging.getLogger(__name__)

MOST_TOKENS = 1 << 20
"""Of one chunk."""
MOST_CHUNKS = 1 << 16
"""Of one record."""
MOST_WAITING = 10_000
"""Records that wait to be written or removed; the oldest are given up."""
READ_AT_ONCE, TAKEN_AT_ONCE = 32, 8192
"""Records that are read together, and chunks that are told of together, at least."""


@dataclass(frozen=True, slots=True)
class Name:
    """What a stored chunk is found and looked up by.

    namespace: its namespace_id, or ``turns_of`` a conversation. chunk_id, context_id: of its KV's
    key. lead_in: that it was computed after.
    """

    namespace: str
    chunk_id: str
    context_id: str
    lead_in: LeadInId


TURNS = "turns-"
"""What the namespaces of conversations begin with."""


def turns_of(namespace: str, conversation: str) -> str:
    """Return the namespace of a conversation's turns: nobody finds them without its key.

    Args:
        namespace: the namespace_id of who holds the conversation.
        conversation: its key.
    """
    key = conversation.encode()
    return TURNS + hashlib.blake2b(namespace.encode(), digest_size=16, key=key).hexdigest()


@dataclass(frozen=True, slots=True, eq=False)
class CatalogChunk:
    """A chunk of the catalogue: tokens (tokens,) uint32.

    follows: the ``chain`` of the chunks that it was computed behind, "" if it was computed behind
    none, or behind other text too.
    """

    name: Name
    tokens: NDArray[np.uint32]
    follows: str = ""


def chain(before: str, chunk_id: str) -> str:
    """Return the hash of a sequence of chunks that ends with ``chunk_id``.

    before: the hash of the sequence without it; "" for no chunk.
    """
    text = f"{before}/{chunk_id}"
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class ComputedRun:
    """Consecutive chunks of one document that one precompute job computed.

    tokens: of the lead-in, and of the document from ``context_start`` on. spans: [start, end) of
    each chunk in them. keys: the chunk id and the context id of each. fresh, lost: indices of the
    chunks whose KV was computed just now, and of those whose KV is not stored. conversation: the
    key of the one whose turns they are, or "".
    """

    lead_in: LeadInId
    tokens: Sequence[int]
    spans: Sequence[tuple[int, int]]
    keys: Sequence[tuple[str, str]]
    context_start: int = 0
    fresh: Collection[int] = ()
    lost: Collection[int] = ()
    conversation: str = ""

    def stored(
        self, namespace: str, index: TokenIndex[str], is_blank: Callable[[Sequence[int]], bool]
    ) -> Iterator[tuple[int, CatalogChunk]]:
        """Yield (position in index, chunk) for stored chunks that are long enough to be found.

        The chain of what is before a chunk is None where there is other text between.

        Args:
            namespace: of the chunks.
            index: of the chunks that are known there.
            is_blank: whether tokens may stand between two chunks of a document.
        """
        lead, tokens = same_lead_in(self.lead_in), self.tokens
        context, behind = self._context(index, is_blank), self.spans[0][0]
        for place, ((start, end), (own_id, context_id)) in enumerate(
            zip(self.spans, self.keys, strict=True)
        ):
            own = np.asarray(tokens[start:end], dtype=np.uint32)
            name = Name(namespace, own_id, context_id, lead)
            if not is_blank(tokens[behind:start]):
                context = None
            if place not in self.lost and len(own) >= index.least:
                follows = (context or "") if context_id else ""
                yield place, CatalogChunk(name, own, follows)
            context, behind = None if context is None else chain(context, own_id), end

    def _context(
        self, index: TokenIndex[str], is_blank: Callable[[Sequence[int]], bool]
    ) -> str | None:
        """Return the ``chain`` of the known chunks before the first one.

        None if there is other text, too.
        """
        first = self.spans[0][0]
        context, end = "", self.context_start
        for one in index.find(self.tokens, self.context_start, first):
            if one.tokens < len(index.tokens(one.name)):
                continue
            if not is_blank(self.tokens[end : one.start]):
                return None
            context, end = chain(context, one.name), one.end
        return context if is_blank(self.tokens[end:first]) else None


class _Head(BaseModel):
    """The first line of a record. chunks: of each its number of tokens, context id and follows."""

    model_config = ConfigDict(strict=True, extra="forbid")

    namespace: Annotated[str, Field(pattern=f"^({TURNS})?[0-9a-f]{{32}}$")]
    lead_in: LeadInId
    chunks: Annotated[
        list[tuple[Annotated[int, Field(gt=0, le=MOST_TOKENS)], MaybeHash, MaybeHash]],
        Field(min_length=1, max_length=MOST_CHUNKS),
    ]


def id_of(tokens: NDArray[np.uint32]) -> str:
    """Return the chunk id, as kv/chunk_kv.py's ``chunk_id`` does, many times faster."""
    return hashlib.blake2b(tokens.astype("<u4").tobytes(), digest_size=16).hexdigest()


def encoded(chunks: Sequence[CatalogChunk]) -> bytes:
    """Return the content of a record; the chunks have one namespace and one lead-in."""
    name = chunks[0].name
    told = [(len(one.tokens), one.name.context_id, one.follows) for one in chunks]
    head = _Head(namespace=name.namespace, lead_in=name.lead_in, chunks=told)
    tokens = (one.tokens.astype("<u4").tobytes() for one in chunks)
    return b"".join((head.model_dump_json().encode(), b"\n", *tokens))


def record_name(content: bytes) -> str:
    """Return the name of a record."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def decoded(content: bytes) -> list[CatalogChunk]:
    """Return the chunks of a record; raises ValueError for what is none."""
    line, _, rest = content.partition(b"\n")
    head = _Head.model_validate_json(line)
    ends = np.cumsum([count for count, _, _ in head.chunks])
    if len(rest) != 4 * ends[-1]:
        raise ValueError(f"{len(rest)} bytes of tokens, of {4 * ends[-1]}")
    tokens = np.frombuffer(rest, "<u4").astype(np.uint32, copy=False)
    if int(tokens.max()) >= 1 << 31:
        raise ValueError("no token has such a number")
    namespace = sys.intern(head.namespace)
    lead_in = same_lead_in(head.lead_in)
    return [
        CatalogChunk(Name(namespace, id_of(own), context, lead_in), own, follows)
        for own, (_, context, follows) in zip(np.split(tokens, ends[:-1]), head.chunks, strict=True)
    ]


@lru_cache
def same_lead_in(lead_in: LeadInId) -> LeadInId:
    """Return an equal lead-in, the same object for many chunks."""
    return lead_in


@dataclass(frozen=True)
class News:
    """What changed: records that others added and removed, and those that the tier has lost."""

    added: Mapping[str, Sequence[CatalogChunk]] = field(default_factory=dict)
    removed: Collection[str] = ()
    lost: Collection[str] = ()


class Catalog:
    """The records of one model in a place that servers share.

    It never raises for a place that fails, nor for what it finds there: what fails is tried again,
    after a second, later less often. Until then changes wait in memory. The first failure of
    several is a warning.

    Args:
        place: where records are kept.
        mac: of the store.
        read_only: whether nothing is written there.
    """

    def __init__(self, place: Place, mac: Mac, *, read_only: bool = False) -> None:
        self._place, self._mac, self.read_only = place, mac, read_only
        self._reading, self._writing = Breaker(), Breaker()
        self._known: set[str] = set()
        self._waiting: dict[str, bytes | None] = {}
        self._identity: bytes | None = None
        self._looks_at = 0.0
        self._has_failed = self._has_warned = False

    def add(self, content: bytes) -> None:
        """Write a record, even if it is known: another server may be removing it just now."""
        if not self.read_only:
            name = record_name(content)
            digest = self._mac.digest(*self._signed(name, content))
            self._wait(name, f"{self._mac.name} {digest}\n".encode() + content)
            self._known.add(name)

    def remove(self, name: str) -> None:
        """Remove a record."""
        if not self.read_only:
            self._wait(name, None)

    def refresh(self, take: Callable[[News], None], *, at_once: bool = False) -> None:
        """Look for what others changed if it is time to, or ``at_once``, and write what waits.

        take: is called with the news, any number of times.
        """
        if at_once or time.monotonic() >= self._looks_at:
            if self._try(self._reading, partial(self._look, take)):
                self._looks_at = time.monotonic() + self._place.seconds
            else:
                self._place.seen = None
        self._write()

    def close(self) -> None:
        """Write what waits if the place answers, and close it."""
        self._write()
        self._place.close()

    # Reading

    def _look(self, take: Callable[[News], None]) -> None:
        names = self._place.names()
        if names is None:
            return
        gone = self._known - names - self._waiting.keys()
        unread = sorted(names - self._known)
        added: dict[str, Sequence[CatalogChunk]] = {}
        try:
            for first in range(0, len(unread), READ_AT_ONCE):
                added.update(self._read(unread[first : first + READ_AT_ONCE]))
                if sum(map(len, added.values())) >= TAKEN_AT_ONCE:
                    take(News(added))
                    added = {}
        finally:  # what was read is not read again
            take(News(added))
        if left := sorted({*unread} - self._known):
            self._place.seen = None  # so that they are asked for again
            self._warn(f"{len(left)} records, such as {left[0]}, cannot be read for now")
        has_lost = self._identity not in (None, self._place.identity)
        self._identity = self._place.identity
        self._known -= gone
        # Only now: what is left of a record that was removed is in another one.
        take(News(lost=gone) if has_lost else News(removed=gone))

    def _read(self, names: Sequence[str]) -> Iterator[tuple[str, Sequence[CatalogChunk]]]:
        """Yield records that can be read and are right."""
        for name, data in self._place.read(names).items():
            self._known.add(name)
            try:
                chunks = self._chunks(name, data)
            except ValueError as error:
                self._warn(f"record {name} is left out: {' '.join(str(error).split())}")
            else:
                yield name, chunks

    def _warn(self, said: str) -> None:
        """Log what is wrong with a record, the first one as a warning."""
        level = logging.DEBUG if self._has_warned else logging.WARNING
        logger.log(level, "%s: %.200s", self._place, said)
        self._has_warned = True

    def _chunks(self, name: str, data: bytes) -> Sequence[CatalogChunk]:
        line, _, content = data.partition(b"\n")
        kind, _, digest = line.decode("ascii", "ignore").partition(" ")
        if kind != self._mac.name:
            raise ValueError(f"it has no digest of the kind {self._mac.name}")
        if not self._mac.holds(digest, *self._signed(name, content)):
            raise ValueError("its digest does not match")
        if record_name(content) != name:
            raise ValueError("its name is not the hash of its content")
        return decoded(content)

    def _signed(self, name: str, content: bytes) -> tuple[bytes, bytes]:
        """Return what a record's digest is computed from: its folder and name, and its content."""
        return f"{self._place.folder}{name}\n".encode(), content

    # Writing

    def _wait(self, name: str, data: bytes | None) -> None:
        self._waiting.pop(name, None)
        self._waiting[name] = data
        if len(self._waiting) > MOST_WAITING:
            oldest = next(iter(self._waiting))
            del self._waiting[oldest]
            self._known.discard(oldest)
        self._write()

    def _write(self) -> None:
        while self._waiting:
            name, data = next(iter(self._waiting.items()))
            if not self._try(self._writing, partial(self._put, name, data)):
                return
            del self._waiting[name]

    def _put(self, name: str, data: bytes | None) -> None:
        if data is None:
            self._place.remove(name)
            self._known.discard(name)  # if another server adds it again, it is news
        else:
            self._place.write(name, data)
            self._identity = self._identity or self._place.identity

    def _try(self, breaker: Breaker, task: Callable[[], None]) -> bool:
        """Run a task unless it failed just now; returns whether it was done."""
        permit = breaker.ask()
        permit = breaker.ask_for_trial() if permit is None else permit
        if permit is None:
            return False
        try:
            task()
        except Exception as error:  # whatever a server sends
            breaker.failed(permit)
            if not self._has_failed:
                logger.warning(
                    "%s: chunks that other servers store are not found in prompts for now "
                    "(%s: %.200s); it is tried again",
                    self._place,
                    type(error).__name__,
                    " ".join(str(error).split()),
                )
            self._has_failed = True
            return False
        breaker.succeeded(permit)
        if self._has_failed and not self._reading.is_failing and not self._writing.is_failing:
            logger.info("%s: chunks that other servers store are found again", self._place)
            self._has_failed = False
        return True
