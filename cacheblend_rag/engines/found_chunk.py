"""The stored chunks of each namespace, those found in a prompt, and which of their KV is used."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, Self

from cacheblend_rag.engines.catalog import TURNS, CatalogChunk, Name
from cacheblend_rag.kv.chunk_kv import KVKey
from cacheblend_rag.prefill.lead_in import PlacedChunk
from cacheblend_rag.text.encoder import PromptEncoder
from cacheblend_rag.text.token_index import TokenIndex, Tokens

LEAST_RUN = 32
"""Fewest tokens of a chunk, or of a part of one, that are found in a prompt."""
LEAST_TURN = 8
"""Fewest tokens of a conversation's turn, or of a part of one, that are found in a prompt."""
MOST_CHUNKS, MOST_TOKENS = 1 << 20, 1 << 29
"""Most chunks, and most tokens of theirs, in all namespaces; the oldest are forgotten first."""
LEADS = {"document": 0, "instruction": 1, "bos": 2, "none": 3}
"""Which lead-in is preferred among those that a chunk was computed after: the one that is most like
what a prompt has before a chunk. ``document`` knows who "she" is, and begins as ``instruction``
does; the next two have at least the first token that attention needs (an attention sink)."""
KEPT = 1 << 16
"""Deleted chunks that are remembered; once there were more, each deletion counts for all chunks."""


@dataclass(frozen=True, slots=True, eq=False)
class Variant(CatalogChunk):
    """A stored KV cache of a chunk, computed in its document or without it.

    record: the catalogue record that lists it. One that several records list is several objects.
    """

    record: str = ""

    @property
    def is_contextual(self) -> bool:
        return self.name.lead_in.name == "document" and bool(self.name.context_id)

    @property
    def rank(self) -> tuple[int, bool]:
        """Sort key: the lowest is used where no variant's document stands before the chunk."""
        return LEADS.get(self.name.lead_in.name, 9), bool(self.name.context_id)


@dataclass(frozen=True, slots=True)
class KnownTokens:
    """The chunks of one namespace: an index of their tokens, and the stored KV of each chunk id."""

    index: TokenIndex[str]
    variants: dict[str, tuple[Variant, ...]] = field(default_factory=dict)


class KnownVariants(dict[str, KnownTokens]):
    """Maps each namespace to its known chunks, and each catalogue record to those that it lists.

    Threads may search it while one changes it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._records: dict[str, tuple[Variant, ...]] = {}
        self._tokens = 0

    def __missing__(self, namespace: str) -> KnownTokens:
        least = LEAST_TURN if namespace.startswith(TURNS) else LEAST_RUN
        return self.setdefault(namespace, KnownTokens(TokenIndex(least)))

    def variants(self, name: Name) -> list[Variant]:
        """Return a chunk's entries: one for each catalogue record that lists its KV cache."""
        variants = self[name.namespace].variants.get(name.chunk_id, ())
        return [one for one in variants if one.name == name]

    def told(self, record: str) -> Sequence[Variant]:
        """Return the chunks that a catalogue record lists; empty for an unknown record."""
        return self._records.get(record, ())

    def enter(self, records: Mapping[str, Sequence[CatalogChunk]]) -> None:
        """Add records and their chunks."""
        new = {record: told for record, told in records.items() if record not in self._records}
        self._index(one for told in new.values() for one in told)
        for record, told in new.items():
            self._records[record] = tuple(
                Variant(name, self[name.namespace].index.tokens(name.chunk_id), follows, record)
                for name, follows in {one.name: one.follows for one in told}.items()
            )
            for one in self._records[record]:
                variants, chunk = self[one.name.namespace].variants, one.name.chunk_id
                self._tokens += 0 if chunk in variants else len(one.tokens)
                variants[chunk] = (*variants.get(chunk, ()), one)

    def strike(self, record: str) -> list[Name]:
        """Remove a record; returns the chunks that no other record lists."""
        struck = self._records.pop(record, ())
        for one in struck:
            known, chunk = self[one.name.namespace], one.name.chunk_id
            left = tuple(other for other in known.variants[chunk] if other is not one)
            if left:
                known.variants[chunk] = left
            else:
                self._tokens -= len(one.tokens)
                del known.variants[chunk]
                known.index.discard(chunk)
        return [one.name for one in struck if not self.variants(one.name)]

    def surplus(self) -> str | None:
        """Return a record to forget if there are too many chunks.

        It is the oldest record of the namespace with most chunks. Without a bound the index would
        grow for ever: many applications never delete documents.
        """
        count = sum(len(known.variants) for known in self.values())
        if count <= MOST_CHUNKS and self._tokens <= MOST_TOKENS:
            return None
        most = max(self, key=lambda one: len(self[one].variants))
        return next(r for r, told in self._records.items() if told[0].name.namespace == most)

    def _index(self, chunks: Iterable[CatalogChunk]) -> None:
        """Add chunks to the token indexes; many at once are faster than one by one."""
        by_namespace = defaultdict[str, list[tuple[Tokens, str]]](list)
        for one in chunks:
            by_namespace[one.name.namespace].append((one.tokens, one.name.chunk_id))
        for namespace, several in by_namespace.items():
            self[namespace].index.add(several)


@dataclass(frozen=True, slots=True)
class FoundChunk:
    """Tokens [start, end) of a prompt are those of a chunk, or of a part of it.

    before, after: how many of the chunk's tokens stand before and after them. protected: must not
    be recomputed, since the prompt lacks the document that its KV depends on. is_missing: whether
    the store lacked its KV when it was asked just now. deletions: see Deletions. is_turn: it is of
    a conversation's turn. is_exact: its KV is that of full prefill of this prompt. altered: see
    ChunkReport.
    """

    name: Name
    start: int
    end: int
    before: int = 0
    after: int = 0
    protected: bool = False
    is_missing: bool = False
    deletions: int = 0
    is_turn: bool = False
    is_exact: bool = False
    altered: str | None = None

    @property
    def tokens(self) -> int:
        """How many of its tokens the prompt has."""
        return self.end - self.start

    @property
    def at(self) -> tuple[Name, int, int, int, int, bool]:
        """Which stored KV is used at which positions: equal work has equal values."""
        where = self.start, self.end, self.before, self.protected
        return self.name, self.deletions, *where

    def placed(self, fingerprint: str = "0" * 64) -> PlacedChunk:
        """Return where its KV stands, under a key with such a fingerprint, for a report any."""
        return PlacedChunk(
            KVKey(self.name.chunk_id, fingerprint, self.name.context_id),
            self.start,
            self.end,
            self.protected,
            before=self.before,
            after=self.after,
            is_turn=self.is_turn,
            is_exact=self.is_exact,
            altered=self.altered,
        )


def _numbers(tokens: Sequence[int]) -> str:
    return " ".join(map(str, tokens))


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What the finder needs from the model's tokenizer.

    says: returns the text of tokens; without a tokenizer, their numbers. opening: the tokens that a
    text begins with (BOS), usually one or none.
    """

    says: Callable[[Sequence[int]], str] = _numbers
    opening: Sequence[int] = ()

    @classmethod
    def of(cls, tokenizer: Any) -> Self:
        """Take both from a tokenizer."""
        return cls(
            lambda tokens: str(tokenizer.decode(list(tokens))), PromptEncoder(tokenizer).opening
        )

    def is_blank(self, tokens: Sequence[int]) -> bool:
        """Whether tokens are white space only, or there are none."""
        return not tokens or self.says(tokens).isspace()


class Deletions:
    """Numbers the deletions of chunks, by this server or another; for several threads.

    KV that was blended of a chunk before it was deleted is not used again, even if the chunk is
    stored anew: what it is kept under holds the number.
    """

    def __init__(self) -> None:
        self._numbers: OrderedDict[tuple[str, str], int] = OrderedDict()
        self._last = self._least = 0
        self._lock = Lock()

    @property
    def happened(self) -> bool:
        """Whether anything was deleted."""
        return self._last > 0

    def note(self, names: Iterable[Name]) -> None:
        """Note the deletion of chunks."""
        with self._lock:
            for name in names:
                key = name.namespace, name.chunk_id
                self._last += 1
                self._numbers[key] = self._last
                self._numbers.move_to_end(key)
                if len(self._numbers) > KEPT:
                    self._least = self._numbers.popitem(last=False)[1]

    def number(self, namespace: str, chunk_id: str) -> int:
        """Return the number of a chunk's last deletion, 0 if there was none."""
        with self._lock:
            return max(self._numbers.get((namespace, chunk_id), 0), self._least)


def chosen(
    variants: Sequence[Variant],
    chains: Sequence[str],
    leads: Callable[[], Collection[str]],
    is_missing: Callable[[Name], bool],
    *,
    unconfirmed_context: bool,
) -> Variant | None:
    """Return the KV that answers for a chunk, None if it would be that of another document.

    The rule is ChunkRegistry's: KV whose whole context stands right before the chunk, else KV
    without context, else KV of the only context that is known. A lead-in that is not the prompt's
    beginning is context, too. Of several, the first one that the store did not lack just now.

    Args:
        variants: the chunk's.
        chains: of the chunks right before it, the longest first.
        leads: returns the lead-ins that the prompt confirms.
        is_missing: whether the store lacked a variant just now.
        unconfirmed_context: whether KV of the only known context may be taken; see LeadInConfig.
    """
    behind = {(one.name.lead_in.tokens, one.name.context_id) for one in variants}
    if len({lead for lead, _ in behind}) > 1 or not unconfirmed_context:
        variants = [one for one in variants if one.name.lead_in.tokens in leads()]
    ranked = sorted(variants, key=lambda one: one.rank)
    right = [
        one
        for context in (*chains, None)
        for one in ranked
        if (one.follows if one.is_contextual else None) == context
    ]
    if not right and len(behind) == 1 and unconfirmed_context:
        right = ranked
    stored = [one for one in right if not is_missing(one.name)]
    return next(iter((*stored, *right)), None)
