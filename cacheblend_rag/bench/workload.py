"""Draws chunks and questions of benchmarks, and runs their cases in turn."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from cacheblend_rag.blend.selectors import make_selector
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.text.chunk import Chunk, Document
from cacheblend_rag.text.prompt import BlendPrompt

ONE_TOKEN = SamplingParams.greedy(max_tokens=1, ignore_eos=True)
LEAD_IN = "none"
"""The lead-in of benchmarks: none, since their prompts begin with a chunk."""
Case = Callable[[int], float]
"""Runs what is measured once: takes the run's number (0 is the warm-up), returns seconds."""

Advance = Callable[[str], None]
"""Called with the label of the next step, for a progress display."""


@dataclass(frozen=True)
class Texts:
    """What a prompt is made of.

    most_tokens: of prompts with all chunks, in any order. separator: between chunks, and before
    the question.
    """

    chunks: Sequence[Chunk]
    question: str
    most_tokens: int
    separator: str = ""

    def prompt(self, chunks: Sequence[Chunk] | None = None) -> BlendPrompt:
        """Return a prompt of all chunks, or of ``chunks``, and the question."""
        parts = self.chunks if chunks is None else chunks
        return BlendPrompt.of(
            *(part for chunk in parts for part in (chunk, self.separator)), self.question
        )


def draw_words(rng: random.Random, count: int, vocabulary: int) -> str:
    """Return a text of exactly ``count`` tokens of a shape's tokenizer."""
    return "".join(f"t{rng.randrange(vocabulary)} " for _ in range(count))


def draw_chunks(
    rng: random.Random, chunks: int, tokens: int, vocabulary: int, *, selector: str, name: str
) -> list[Chunk]:
    """Return chunks of ``tokens`` random one-token words; selector, name: see ``to_chunks``."""
    texts = [draw_words(rng, tokens, vocabulary) for _ in range(chunks)]
    return to_chunks(texts, selector=selector, name=name, separator=" ")


def to_chunks(texts: Sequence[str], *, selector: str, name: str, separator: str) -> list[Chunk]:
    """Return texts as the chunks of one document, ``name``; evicting it removes all their KV.

    If the selector needs a prior, each has the chunks before it as context, with ``separator``
    between them.
    """
    if make_selector(selector).needs_prior:
        return Document(name, tuple(texts), separator=separator).to_chunks()
    return [Chunk(text, name) for text in texts]


def sentences_of(texts: Sequence[str]) -> list[str]:
    """Return the sentences of texts, cut behind full stops, those of abbreviations among them."""
    return [
        sentence if sentence.endswith("?") else f"{sentence}."
        for text in texts
        for sentence in text.rstrip(".").split(". ")
    ]


def run_in_turns(
    cases: Mapping[str, Case], repeat: int, advance: Advance
) -> dict[str, list[float]]:
    """Run every case once per turn, starting with a different one; return each one's seconds.

    In turn, so that changes of the machine affect all of them. Turn 0 is a warm-up and is not
    returned.
    """
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    names = list(cases)
    for turn in range(repeat + 1):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            advance(f"turn {turn} of {repeat}: {name}" if turn else f"warm-up: {name}")
            taken = cases[name](turn)
            seconds[name] += [taken] if turn else []
    return seconds
