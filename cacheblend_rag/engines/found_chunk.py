"""A stored chunk that was found in a prompt, and the rule by which its KV is chosen."""

from __future__ import annotations

import hashlib
import operator
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, Self

from cacheblend_rag.engines.catalog import Name
from cacheblend_rag.kv.chunk_kv import KVKey
from cacheblend_rag.prefill.lead_in import PlacedChunk
from cacheblend_rag.text.encoder import PromptEncoder

LEADS = {"document": 0, "instruction": 1, "bos": 2, "none": 3}
"""Which lead-in is preferred among those that a chunk was computed after: the one that is most like
what a prompt has before a chunk. ``document`` knows who "she" is, and begins as ``instruction``
does; the next two have at least the first token that attention needs (an attention sink)."""
KEPT = 1 << 16
"""Deleted chunks that are remembered; once there were more, each deletion counts for all chunks."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One of the KV caches of a chunk: in its document, or without it.

    follows: see ``CatalogChunk``. record: that tells of it; there is one such object for each.
    """

    name: Name
    follows: str
    record: str

    @property
    def is_contextual(self) -> bool:
        return self.name.lead_in.name == "document" and bool(self.name.context_id)

    @property
    def rank(self) -> tuple[int, bool]:
        """Which one is taken where none continues its document; of equals the one known first."""
        return LEADS.get(self.name.lead_in.name, 9), bool(self.name.context_id)


@dataclass(frozen=True, slots=True)
class FoundChunk:
    """Tokens [start, end) of a prompt are those of a chunk, or of a part of it.

    before, after: the chunk's tokens that the prompt lacks. protected: must not be recomputed,
    since the prompt lacks the document that its KV depends on. is_missing: whether the store lacked
    its KV when it was asked just now. deletions: see Deletions. is_turn: it is of a conversation's
    turn. is_exact: its KV is that of full prefill of this prompt.
    """

    name: Name
    start: int
    end: int
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    protected: bool = False
    is_missing: bool = False
    deletions: int = 0
    is_turn: bool = False
    is_exact: bool = False

    @property
    def tokens(self) -> int:
        """How many of its tokens the prompt has."""
        return self.end - self.start

    @property
    def at(self) -> tuple[Name, int, int, int, int, bool]:
        """Which stored KV stands where: all that a blend takes of it, its own tokens aside."""
        where = self.start, self.end, len(self.before), self.protected
        return self.name, self.deletions, *where

    def placed(self, fingerprint: str) -> PlacedChunk:
        """Return where its KV stands, under a key with such a fingerprint."""
        return PlacedChunk(
            KVKey(self.name.chunk_id, fingerprint, self.name.context_id),
            self.start,
            self.end,
            self.protected,
            before=self.before,
            after=self.after,
            is_turn=self.is_turn,
            is_exact=self.is_exact,
        )


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What the finder needs from the model's tokenizer.

    is_blank: whether tokens are a text of white space, or none. opening: the tokens that a text
    begins with (BOS), usually one or none.
    """

    is_blank: Callable[[Sequence[int]], bool] = operator.not_
    opening: Sequence[int] = ()

    @classmethod
    def of(cls, tokenizer: Any) -> Self:
        """Return what a tokenizer says."""

        def is_blank(tokens: Sequence[int]) -> bool:
            return not tokens or str(tokenizer.decode(list(tokens))).isspace()

        return cls(is_blank, PromptEncoder(tokenizer).opening)


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


def chain(before: str, chunk_id: str) -> str:
    """Return the hash of a sequence of chunks that ends with a chunk; before: of those before it.

    The hash of no chunk is "".
    """
    text = f"{before}/{chunk_id}"
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
