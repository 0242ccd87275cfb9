"""Finds the rest of a chunk in a prompt where a program has re-encoded its text.

JSON, ``str`` of a list, HTML, quoting, indenting and collapsed or converted line ends alter few
characters of a text, and the tokens around them. The tokens between are the same. Of what differs
the text is compared: the search goes on behind it only if the text is the same once decoded.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from cacheblend_rag.text.runs import Ids, Run

REACH = 32
"""Most tokens between two runs of equal tokens."""
MOST_TRIED = 3
"""Most places behind a run that are tried as the beginning of the next one."""
MOST_COMPARED = 1024
"""Most comparisons of texts in one search; they bound its time."""
IN_VAIN = 32
"""How many comparisons it counts as to find nothing before or behind a run."""

LAYOUT = re.compile(r"[\s>]+")
"""Characters that quoting, indenting and other line ends add or remove."""
ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|(.))", re.DOTALL)
CONTROLS = {"n": "\n", "r": "\r", "t": "\t"}


class SameText:
    """Compares the texts of a prompt's and a chunk's tokens; false with no comparisons ``left``.

    says: decodes tokens.
    """

    def __init__(self, says: Callable[[Sequence[int]], str]) -> None:
        self._says, self.left = says, MOST_COMPARED

    def __call__(self, here: Sequence[int], own: Sequence[int]) -> bool:
        """Whether the prompt's tokens ``here`` have the text of the chunk's tokens ``own``."""
        self.left -= 1
        return self.left >= 0 and reencoding(self._says(here), self._says(own)) is not None


def reencoding(here: str, text: str) -> str | None:
    """Return how ``here`` is re-encoded, None unless it is ``text``."""
    wanted = LAYOUT.sub("", text)
    return next((how for how, undo in FORMS.items() if LAYOUT.sub("", undo(here)) == wanted), None)


def _unescaped(text: str) -> str:
    """Undo the escapes of JSON and Python strings; an incomplete one stays."""

    def character(found: re.Match[str]) -> str:
        code = found[1] or found[2]
        return chr(int(code, 16)) if code else CONTROLS.get(found[3], found[3])

    plain = ESCAPE.sub(character, text)
    return plain.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


FORMS: Mapping[str, Callable[[str], str]] = {
    "with other white space, or quoted": lambda text: re.sub(r"(?m)^[ \t>]+|\r", "", text),
    "escaped, as in JSON": _unescaped,
    "escaped, as in HTML": html.unescape,
}
"""Undoes each way to re-encode a text."""


def followed(tokens: Ids, chunk: Ids, run: Run, is_same: SameText) -> list[Run]:
    """Return a run with those of the same chunk before and behind it, in order.

    Args:
        tokens: (tokens,) of the prompt.
        chunk: (tokens,) of the chunk.
        run: where the two are the same.
        is_same: compares what is between two runs.
    """
    last = run.skip + run.tokens
    before = [
        Run(run.start - at - size, run.start - at, run.skip - own_at - size)
        for at, own_at, size in _resumed(
            tokens[: run.start][::-1],
            chunk[: run.skip][::-1],
            lambda here, own: is_same(here[::-1], own[::-1]),
        )
    ]
    behind = [
        Run(run.end + at, run.end + at + size, last + own_at)
        for at, own_at, size in _resumed(tokens[run.end :], chunk[last:], is_same)
    ]
    if not before and not behind:
        is_same.left -= IN_VAIN
    return [*reversed(before), run, *behind]


def _resumed(
    tokens: Ids, chunk: Ids, is_same: Callable[[Sequence[int], Sequence[int]], bool]
) -> Iterator[tuple[int, int, int]]:
    """Yield the next runs: index in the prompt, index in the chunk, number of tokens."""
    at = own_at = 0
    while own_at < chunk.size:
        here = tokens[at : at + REACH].tolist()
        own = chunk[own_at : own_at + REACH].tolist()
        places = sorted(_places(here, own), key=sum)[:MOST_TRIED]
        place = next((p for p in places if is_same(here[: p[0]], own[: p[1]])), None)
        if place is None:
            return
        at, own_at = at + place[0], own_at + place[1]
        size = _alike(tokens[at:], chunk[own_at:])
        yield at, own_at, size
        at, own_at = at + size, own_at + size


def _places(here: Sequence[int], own: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the index in each where both have the same token."""
    known = dict(zip(reversed(own), reversed(range(len(own))), strict=True))
    for index, token in enumerate(here):
        if token in known:
            yield index, known[token]


def _alike(tokens: Ids, others: Ids) -> int:
    """Return the length of the common prefix."""
    size = min(tokens.size, others.size)
    different = np.flatnonzero(tokens[:size] != others[:size])
    return int(different[0]) if different.size else size
