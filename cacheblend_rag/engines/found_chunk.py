"""A stored chunk that was found in a prompt; what was deleted, and what a tokenizer says."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, Self

from cacheblend_rag.engines.catalog import Name
from cacheblend_rag.kv.chunk_kv import KVKey
from cacheblend_rag.prefill.lead_in import PlacedChunk
from cacheblend_rag.text.encoder import PromptEncoder

KEPT = 1 << 16
"""Deleted chunks that are remembered; once there were more, each deletion counts for all chunks."""


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
        """Return what a tokenizer says."""
        return cls(
            lambda tokens: str(tokenizer.decode(list(tokens))), PromptEncoder(tokenizer).opening
        )

    def is_blank(self, tokens: Sequence[int]) -> bool:
        """Whether tokens are a text of white space, or none."""
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
