"""Finds parts of known token sequences in a prompt's tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

MOST_CANDIDATES = 8
"""Places that are compared where a prompt's tokens begin as those of several sequences do."""


@dataclass(frozen=True, slots=True)
class TokenRun:
    """Tokens [start, end) of a prompt equal those of a sequence from index ``skip`` on.

    sequence: index of the sequence.
    """

    sequence: int
    start: int
    end: int
    skip: int


class TokenIndex:
    """An index of token sequences by all of their runs of ``least`` tokens.

    sequences: those that come first win over equal later ones. least: tokens of the shortest run
    that is found.
    """

    def __init__(self, sequences: Sequence[Sequence[int]], least: int) -> None:
        self._sequences, self._least = [tuple(one) for one in sequences], least
        self._places: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        for index, tokens in enumerate(self._sequences):
            for at in range(len(tokens) - least + 1):
                places = self._places.setdefault(tokens[at : at + least], [])
                if len(places) < MOST_CANDIDATES:
                    places.append((index, at))

    def find(self, token_ids: Sequence[int], start: int, end: int) -> Iterator[TokenRun]:
        """Yield runs in ``token_ids[start:end]``, in order, without overlaps, the longest first
        where several begin.
        """
        tokens, at = tuple(token_ids[start:end]), 0
        while at + self._least <= len(tokens):
            places = self._places.get(tokens[at : at + self._least], ())
            found = [(self._length(tokens, at, place), place) for place in places]
            if not found:
                at += 1
                continue
            length, (sequence, skip) = max(found, key=lambda one: one[0])
            yield TokenRun(sequence, start + at, start + at + length, skip)
            at += length

    def _length(self, tokens: tuple[int, ...], at: int, place: tuple[int, int]) -> int:
        """Return how many tokens from ``at`` on equal those of a sequence from a place on."""
        sequence, skip = place
        known = self._sequences[sequence]
        most = min(len(tokens) - at, len(known) - skip)
        length = self._least
        while length < most and tokens[at + length] == known[skip + length]:
            length += 1
        return length
