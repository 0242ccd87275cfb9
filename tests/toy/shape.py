"""How large and how hard the drawn prompts are."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CorpusShape:
    """How large and how hard a draw is; pairs are inclusive bounds.

    Attributes:
        documents: documents in a draw.
        chunks: chunks a document.
        total_chunks: chunks in a draw.
        direct_facts: facts in each naming chunk.
        referring_facts: facts in each document's later chunks together.
        context_tokens: filler sentences are added until the chunks hold about this many tokens.
        names: size of the pools of first and last names.
        explicit: share of draws whose later chunks name the subject again.
        mixed: share of draws whose documents differ in type and kinds of fact.
        wordings: how many of the ways to state and to ask a fact are used.
    """

    documents: tuple[int, int] = (4, 6)
    chunks: tuple[int, int] = (2, 3)
    total_chunks: tuple[int, int] = (10, 14)
    direct_facts: tuple[int, int] = (1, 2)
    referring_facts: tuple[int, int] = (3, 4)
    context_tokens: tuple[int, int] = (1090, 1390)
    names: tuple[int, int] = (32, 48)
    explicit: float = 0.0
    mixed: float = 0.0
    wordings: int = 2


EVALUATION_SHAPE = CorpusShape()
