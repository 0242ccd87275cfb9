"""Hints: the retrieved chunks of the query at hand, from the postprocessor to the LLM.

They travel in a context variable, so each thread and each task sees those of its own query. A hint
only prefers one chunk over another of the same text: with wrong hints, or none, an answer is as
right as ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass

from cacheblend_rag import Chunk

EDGE_CHARACTERS = 48

_expected: ContextVar[tuple[HintedNode, ...]] = ContextVar("cacheblend_hints", default=())


@dataclass(frozen=True, slots=True)
class HintedNode:
    """A retrieved node's text as prompts may show it: with its metadata, and bare.

    parts: the known chunks in a text that is none itself, such as a window of sentences.
    """

    shown: Chunk
    bare: Chunk
    parts: tuple[Chunk, ...] = ()

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """What prompts that show the node with its metadata hold."""
        return self.parts or (self.shown,)


def expect(nodes: Sequence[HintedNode]) -> None:
    """Let the following calls of this thread or task expect these nodes, and no others."""
    _expected.set(tuple(nodes))


def hints_in(prompt: str) -> list[Chunk]:
    """Return the expected chunks that stand in ``prompt``, whole or cut.

    Of a node that stands there neither whole nor in part (it belongs to another call of the same
    query) nothing is said.
    """
    found: list[Chunk] = []
    absent: list[HintedNode] = []
    rest = prompt
    for node in sorted(_expected.get(), key=lambda node: -len(node.shown.text)):
        chunk = next((c for c in (node.shown, node.bare) if c.text and c.text in rest), None)
        if chunk is None:
            absent.append(node)
        else:
            found += node.parts or (chunk,)
            rest = rest.replace(chunk.text, "\n")
    cut = [node for node in absent if _stands_cut(node.bare.text, rest)]
    return found + [chunk for node in cut for chunk in node.chunks]


def _stands_cut(text: str, prompt: str) -> bool:
    return bool(text) and (text[:EDGE_CHARACTERS] in prompt or text[-EDGE_CHARACTERS:] in prompt)
