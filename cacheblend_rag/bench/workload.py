"""Cuts real text into chunks, writes requests over them, and runs the ways to measure in turn."""

from __future__ import annotations

import json
import random
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice
from pathlib import Path

import numpy as np

from cacheblend_rag.blend.selectors import make_selector
from cacheblend_rag.demo.passages import load_real_texts
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.text.chunk import SEPARATOR, Chunk, Document

ONE_TOKEN = SamplingParams.greedy(max_tokens=1, ignore_eos=True)
LEAD_IN = "none"
"""The lead-in of benchmarks: none, since their prompts begin with a chunk."""
DOCUMENTS, PASSAGES, WORDS = 10, 4, 350
"""Of a workload: documents, passages of each, and words of a passage, about 500 tokens."""
OUTPUT_TOKENS = 64
SEED = 7
Case = Callable[[int], float]
"""Runs what is measured once: takes the run's number (0 is the warm-up), returns seconds."""

Advance = Callable[[str], None]
"""Called with the label of the next step, for a progress display."""


def to_chunks(texts: Sequence[str], *, selector: str, name: str, separator: str) -> list[Chunk]:
    """Return texts as the chunks of one document, ``name``; evicting it removes all their KV.

    If the selector needs a prior, each has the chunks before it as context, with ``separator``
    between them.
    """
    if make_selector(selector).needs_prior:
        return Document(name, tuple(texts), separator=separator).to_chunks()
    return [Chunk(text, name) for text in texts]


def pieces(
    rng: random.Random, texts: Sequence[str], tokens: int, count_tokens: Callable[[str], int]
) -> Iterator[str]:
    """Yield passages of whole words, at most ``tokens`` tokens each, from texts in random order.

    Once all texts are used up, their sentences come again, in an order of their own each time.
    """
    words = chain.from_iterable(text.split() for text in _endless(rng, texts))
    held: list[str] = []
    while True:
        held += islice(words, max(0, tokens - len(held)))  # a word has at least one token
        lengths = range(1, tokens + 1)
        fit = bisect_right(lengths, tokens, key=lambda count: count_tokens(" ".join(held[:count])))
        yield " ".join(held[: max(fit, 1)])
        held = held[max(fit, 1) :]


def _endless(rng: random.Random, texts: Sequence[str]) -> Iterator[str]:
    yield from rng.sample(texts, len(texts))
    sentences = [sentence for text in texts for sentence in re.split(r"(?<=[.?]) ", text)]
    while True:
        yield from rng.sample(sentences, len(sentences))


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
    """Write requests as JSONL for other load generators, such as ``vllm bench serve``.

    ``requests.jsonl`` has ``requests`` prompts, each with ``chunks`` passages of real text in
    random order, and a question; how often a passage occurs follows Zipf's law. ``documents/`` has
    what a server stores of each document.

    Raises ConfigError for more passages in a prompt than there are, and OSError.
    """
    count = DOCUMENTS * PASSAGES
    if chunks > count:
        raise ConfigError(f"--chunks {chunks} must be at most {count}")
    rng, real, draws = random.Random(SEED), load_real_texts(), np.random.default_rng(SEED)
    cut = pieces(rng, real.passages, WORDS, lambda text: len(text.split()))
    documents = [list(islice(cut, PASSAGES)) for _ in range(DOCUMENTS)]
    (folder / "documents").mkdir(parents=True, exist_ok=True)
    for number, passages in enumerate(documents):
        file = folder / "documents" / f"bench-{number}"
        file.write_text(json.dumps({"chunks": passages}))
    ranked = rng.sample([*chain.from_iterable(documents)], count)
    shares = 1 / np.arange(1, count + 1)
    lines = []
    for _ in range(requests):
        chosen = draws.choice(count, chunks, replace=False, p=shares / shares.sum())
        question = f"Question: {rng.choice(real.questions)}\nAnswer:"
        prompt = SEPARATOR.join([*(ranked[rank] for rank in chosen), question])
        lines.append(json.dumps({"prompt": prompt, "output_tokens": OUTPUT_TOKENS}))
    written = folder / "requests.jsonl"
    written.write_text("".join(f"{line}\n" for line in lines))
    return written
