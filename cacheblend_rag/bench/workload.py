"""Draws passages and requests from the package's real texts, and runs ways to answer in turn."""

from __future__ import annotations

import json
import random
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path

from cacheblend_rag.blend.selectors import make_selector
from cacheblend_rag.demo.passages import load_real_texts
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.text.chunk import SEPARATOR, Chunk, Document

ONE_TOKEN = SamplingParams.greedy(max_tokens=1, ignore_eos=True)
LEAD_IN = "none"
"""The lead-in of benchmarks: none, since their prompts begin with a chunk."""
PARAGRAPH = 4
"""Sentences together, when they come again."""
DOCUMENTS, PASSAGES, WORDS = 10, 4, 350
"""Of a workload: documents, passages of each, and words of a passage, about 500 tokens."""
OUTPUT_TOKENS = 64
SEED = 7
_WORD = re.compile(r"\S+")
Case = Callable[[int], float]
"""Runs what is measured once: takes the run's number (0 is the warm-up), returns seconds."""
Advance = Callable[[str], None]
"""Called with the label of the next step, for a progress display."""


def cut_passages(
    rng: random.Random, tokens: int, count_tokens: Callable[[str], int]
) -> Iterator[str]:
    """Yield real text in pieces of as many whole words as fit in ``tokens`` tokens, at least one.

    Texts come in random order; then their sentences come again, in another order each time.

    count_tokens: tells how many tokens a text has.
    """
    texts, rest = _endless(rng, load_real_texts().passages), ""
    while True:
        while count_tokens(rest) <= tokens:
            rest += (SEPARATOR if rest else "") + next(texts)
        ends = [word.end() for word in _WORD.finditer(rest)]
        fitting = bisect_right(ends, tokens, key=lambda end: count_tokens(rest[:end]))
        end = ends[max(fitting, 1) - 1]
        yield rest[:end]
        rest = rest[end:].lstrip()


def _endless(rng: random.Random, texts: Sequence[str]) -> Iterator[str]:
    yield from rng.sample(texts, len(texts))
    sentences = [
        sentence if sentence.endswith("?") else f"{sentence}."
        for text in texts
        for sentence in text.rstrip(".").split(". ")
    ]
    while True:
        again = rng.sample(sentences, len(sentences))
        for start in range(0, len(again), PARAGRAPH):
            yield " ".join(again[start : start + PARAGRAPH])


def to_chunks(
    texts: Sequence[str], *, selector: str, name: str, separator: str = SEPARATOR
) -> list[Chunk]:
    """Return texts as the chunks of one document, ``name``; evicting it removes all their KV.

    If the selector needs a prior, each has the chunks before it as context, with ``separator``
    between them.
    """
    if make_selector(selector).needs_prior:
        return Document(name, tuple(texts), separator=separator).to_chunks()
    return [Chunk(text, name) for text in texts]


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


def write_workload(folder: Path, requests: int, chunks: int) -> Path:
    """Write a RAG workload for the load generators of others; return the file of requests.

    Each line of ``requests.jsonl`` has a prompt: ``chunks`` passages and a question. Passages are
    asked for by Zipf's law, as those of a knowledge base are, in random order. ``documents/`` holds
    what a server stores of each document.

    Raises ConfigError for more passages in a prompt than there are, and OSError.
    """
    if chunks > DOCUMENTS * PASSAGES:
        raise ConfigError(f"--chunks {chunks} must be at most {DOCUMENTS * PASSAGES}")
    rng, questions = random.Random(SEED), load_real_texts().questions
    cut = cut_passages(rng, WORDS, lambda text: len(text.split()))
    passages = [next(cut) for _ in range(DOCUMENTS * PASSAGES)]
    (folder / "documents").mkdir(parents=True, exist_ok=True)
    for number in range(DOCUMENTS):
        own = passages[number * PASSAGES : (number + 1) * PASSAGES]
        (folder / "documents" / f"bench-{number}").write_text(json.dumps({"chunks": own}))
    rng.shuffle(passages)
    weights, path = zipf_weights(len(passages), 1.0), folder / "requests.jsonl"
    with path.open("w") as file:
        for _ in range(requests):
            parts = [passages[rank] for rank in draw_ranks(rng, weights, chunks)]
            prompt = SEPARATOR.join([*parts, f"Question: {rng.choice(questions)}\nAnswer:"])
            file.write(f"{json.dumps({'prompt': prompt, 'output_tokens': OUTPUT_TOKENS})}\n")
    return path


def zipf_weights(count: int, exponent: float) -> list[float]:
    """Return the cumulative weights of so many ranks by Zipf's law, for ``draw_ranks``."""
    return [*accumulate(1 / rank**exponent for rank in range(1, count + 1))]


def draw_ranks(rng: random.Random, weights: Sequence[float], count: int) -> tuple[int, ...]:
    """Return distinct ranks from 0 on, in the order in which they were drawn."""
    found: dict[int, None] = {}
    while len(found) < count:
        found[rng.choices(range(len(weights)), cum_weights=weights)[0]] = None
    return tuple(found)
