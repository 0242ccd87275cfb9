"""Hints: the retrieved chunks of the query at hand, from the postprocessor to the LLM.

They travel in a context variable, so each thread and each task sees those of its own query. A hint
only prefers one chunk over another of the same text: with wrong hints, or none, an answer is as
right as ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar

from cacheblend_rag import Chunk

EDGE_CHARACTERS = 48
Hint = tuple[Chunk, ...]
"""A retrieved node's text as prompts may show it: with its metadata, and bare."""

_expected: ContextVar[tuple[Hint, ...]] = ContextVar("cacheblend_hints", default=())


def expect(hints: Sequence[Hint]) -> None:
    """Let the following calls of this thread or task expect these nodes, and no others."""
    _expected.set(tuple(hints))


def hints_in(prompt: str) -> list[Chunk]:
    """Return the expected chunks that stand in ``prompt``, whole or cut.

    Of a node that stands there neither whole nor in part (it belongs to another call of the same
    query) nothing is said.
    """
    found: list[Chunk] = []
    absent: list[Hint] = []
    rest = prompt
    for hint in sorted(_expected.get(), key=lambda hint: -len(hint[0].text)):
        chunk = next((one for one in hint if one.text and one.text in rest), None)
        if chunk is None:
            absent.append(hint)
        else:
            found.append(chunk)
            rest = rest.replace(chunk.text, "\n")
    return found + [hint[0] for hint in absent if _stands_cut(hint[-1].text, rest)]


def _stands_cut(text: str, prompt: str) -> bool:
    return bool(text) and (text[:EDGE_CHARACTERS] in prompt or text[-EDGE_CHARACTERS:] in prompt)
