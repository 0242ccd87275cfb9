"""Draws chunks and questions of benchmarks: random words, or the sentences of real passages."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from cacheblend_rag.blend.selectors import make_selector
from cacheblend_rag.demo.passages import load_passages
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.engines.transformers import TransformersEngine
from cacheblend_rag.text.chunk import Chunk, Document
from cacheblend_rag.text.prompt import BlendPrompt

ONE_TOKEN = SamplingParams.greedy(max_tokens=1, ignore_eos=True)


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


def zipf_weights(count: int, exponent: float) -> list[float]:
    """Return the cumulative weights of so many ranks by Zipf's law, for ``draw_ranks``."""
    return [*accumulate(1 / rank**exponent for rank in range(1, count + 1))]


def draw_ranks(rng: random.Random, weights: Sequence[float], count: int) -> tuple[int, ...]:
    """Return distinct ranks from 0 on, in the order in which they were drawn."""
    found: dict[int, None] = {}
    while len(found) < count:
        found[rng.choices(range(len(weights)), cum_weights=weights)[0]] = None
    return tuple(found)


def sample_sentences() -> list[str]:
    """Return the sentences of the bundled sample of real passages."""
    return sentences_of([passage.text for passage in load_passages().passages])


def sentences_of(texts: Sequence[str]) -> list[str]:
    """Return the sentences of texts, cut behind full stops, those of abbreviations among them."""
    return [
        sentence if sentence.endswith("?") else f"{sentence}."
        for text in texts
        for sentence in text.rstrip(".").split(". ")
    ]


def draw_passage(
    rng: random.Random, sentences: Sequence[str], tokens: int, engine: TransformersEngine
) -> str:
    """Return a passage of sentences in random order, of about so many tokens."""
    ids: tuple[int, ...] = ()
    while len(ids) < tokens:
        ids += engine.tokenize(f"{' ' if ids else ''}{rng.choice(sentences)}")
    return str(engine.tokenizer.decode(list(ids[:tokens]), skip_special_tokens=True)).strip()


LEAD_IN = "none"
"""The lead-in of benchmarks: none, since their prompts begin with a chunk."""
