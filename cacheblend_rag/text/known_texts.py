"""Keeps the tokens of texts that were encoded before, and puts prompts together of them.

The tokens at the edges of a passage in a prompt depend on the text beside it; those inside do not.
What is encoded is therefore each seam: the text from the last safe cut in one known text to the
first one in the next.

A safe cut is before a space between two ASCII letters or digits, and only for tokenizers of which
``has_cuts`` shows that no token lies across such a place.
"""

from __future__ import annotations

import re
import sys
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    Ids = array[int]

CUT = re.compile(r"(?<=[A-Za-z0-9])(?= [A-Za-z0-9])")
CROSSING = re.compile("[A-Za-z0-9][ \u0120\u2581]")
"""In a vocabulary: a token that holds a place of cuts. A space is itself, byte-level BPE's mark of
it, or SentencePiece's."""
MODELS = {"BPE", "WordPiece", "WordLevel"}
"""Models of ``tokenizers`` whose tokens on both sides of a place that no token crosses are
independent. A Unigram model's are but for rounding."""
SAMPLES = (
    "The harbour is older than the town",
    "Half of it 19 84 or so (Why 42 then)",
    "x y Zulu\n\nQ7 it's 3 o'clock in A B",
)
"""Texts that must have the same tokens if they are cut at any place."""
SHORTEST = 400
"""Characters of the shortest text of which the inner part is skipped."""
ENTRY_BYTES = 700
"""Memory of an entry beside its text and tokens, about."""

Encode = Callable[[str], Sequence[int]]


@dataclass(frozen=True, slots=True)
class Inside:
    """The part of a text that need not be encoded again.

    start, stop: its characters. first, last: its tokens [first, last) among the text's.
    """

    start: int
    stop: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class KnownText:
    """A text's tokens by itself. inside: None if it has no part that can be skipped."""

    ids: Ids
    inside: Inside | None = None


class KnownTexts:
    """The texts used last, with their tokens, up to a number of bytes. Thread-safe.

    A key is a text, and whether special tokens in it are split.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity, self._bytes = capacity_bytes, 0
        self._texts: OrderedDict[tuple[str, bool], KnownText] = OrderedDict()
        self._lock = Lock()

    def get(self, key: tuple[str, bool], encode: Callable[[], KnownText]) -> KnownText:
        """Return a known text, or encode it and keep it."""
        with self._lock:
            found = self._texts.get(key)
            if found is not None:
                self._texts.move_to_end(key)
                return found
        made = encode()  # without the lock: other texts need not wait for it
        size = _size(key[0], made)
        if size > self._capacity:
            return made
        with self._lock:
            if key not in self._texts:
                self._texts[key] = made
                self._bytes += size
            while self._bytes > self._capacity:
                (old, _), dropped = self._texts.popitem(last=False)
                self._bytes -= _size(old, dropped)
        return made


def _size(text: str, known: KnownText) -> int:
    return sys.getsizeof(text) + known.ids.itemsize * len(known.ids) + ENTRY_BYTES


def has_cuts(tokenizer: Any, encode: Encode, encode_behind: Encode) -> bool:
    """Whether texts cut before a space have the tokens of the whole, wherever they are cut.

    encode, encode_behind: return the tokens of a text alone, and as after another text.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    model = getattr(backend, "model", None)
    if backend is None or type(model).__name__ not in MODELS or getattr(model, "dropout", None):
        return False
    if CROSSING.search("\0".join(backend.get_vocab(with_added_tokens=True))):
        return False
    for token in backend.get_added_tokens_decoder().values():
        if token.rstrip and re.search("[A-Za-z0-9]$", token.content):  # takes the space along
            return False
    for sample in SAMPLES:
        whole = [*encode(sample)]
        for place in (found.start() for found in CUT.finditer(sample)):
            if [*encode(sample[:place]), *encode_behind(sample[place:])] != whole:
                return False
    return True


def find_inside(text: str, ids: Ids, encode_behind: Encode) -> Inside | None:
    """Return the part of a text that need not be encoded again; ids: the text's tokens.

    What stands beside the text may change its tokens up to the first place at which it can be cut,
    and from the last such place on.
    """
    places = [found.start() for found in CUT.finditer(text)]
    if not places or places[-1] - places[0] < len(text) // 2:
        return None
    start, stop = places[0], places[-1]
    head, tail = array("i", encode_behind(text[:start])), array("i", encode_behind(text[stop:]))
    if ids[: len(head)] != head or ids[len(ids) - len(tail) :] != tail:
        return None
    return Inside(start, stop, len(head), len(ids) - len(tail))
