"""Draws chunks and questions of benchmarks: random words, or the sentences of real passages."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate

from cacheblend_rag.blend.selectors import make_selector
from cacheblend_rag.demo.passages import load_passages
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.engines.transformers import TransformersEngine
from cacheblend_rag.text.chunk import Chunk, Document

ONE_TOKEN = SamplingParams.greedy(max_tokens=1, ignore_eos=True)


def draw_words(rng: random.Random, count: int, vocabulary: int) -> str:
    """Return a text of exactly ``count`` tokens of a shape's tokenizer."""
    return "".join(f"t{rng.randrange(vocabulary)} " for _ in range(count))


def draw_chunks(
    rng: random.Random, chunks: int, tokens: int, vocabulary: int, *, selector: str, name: str
) -> list[Chunk]:
    """Return chunks of ``tokens`` tokens each.

    They belong to a document called ``name``, by which their KV can be evicted. If the selector
    needs a prior, each has the chunks before it as context.
    """
    texts = tuple(draw_words(rng, tokens, vocabulary) for _ in range(chunks))
    if make_selector(selector).needs_prior:
        return Document(name, texts, separator=" ").to_chunks()
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
    return [
        f"{sentence}."
        for passage in load_passages().passages
        for sentence in passage.text.rstrip(".").split(". ")
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
