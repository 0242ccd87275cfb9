"""Draws chunks, questions and requests, random or real, and runs the ways to measure in turn."""

from __future__ import annotations

import json
import random
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

from cacheblend_rag.blend.selectors import make_selector
from cacheblend_rag.demo.passages import load_real_texts
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.text.chunk import SEPARATOR, Chunk, Document
from cacheblend_rag.text.encoder import PromptEncoder
from cacheblend_rag.text.prompt import BlendPrompt

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


class Cutter:
    """Joins texts in random order and cuts the result, between words, into pieces.

    Once all texts are used up, their sentences come again, in an order of their own each time.

    count_tokens: tells how many tokens a text has. separator: between texts.
    """

    def __init__(
        self,
        rng: random.Random,
        texts: Sequence[str],
        count_tokens: Callable[[str], int],
        separator: str,
    ) -> None:
        self._count, self._separator = count_tokens, separator
        self._more, self._rest = _endless(rng, texts), ""

    def cut(self, tokens: int) -> str:
        """Return the next piece: as many whole words as fit in ``tokens`` tokens, at least one."""
        while self._count(self._rest) <= tokens:
            self._rest += (self._separator if self._rest else "") + next(self._more)
        ends = [word.end() for word in _WORD.finditer(self._rest)]
        fitting = bisect_right(ends, tokens, key=lambda end: self._count(self._rest[:end]))
        end = ends[max(fitting, 1) - 1]
        piece, self._rest = self._rest[:end], self._rest[end:].lstrip()
        return piece


def _endless(rng: random.Random, texts: Sequence[str]) -> Iterator[str]:
    yield from rng.sample(texts, len(texts))
    sentences = sentences_of(texts)
    while True:
        again = rng.sample(sentences, len(sentences))
        for start in range(0, len(again), PARAGRAPH):
            yield " ".join(again[start : start + PARAGRAPH])


def draw_real_texts(
    rng: random.Random,
    encoder: PromptEncoder,
    *,
    chunks: int,
    chunk_tokens: int,
    question_tokens: int,
    selector: str,
    name: str,
) -> Texts:
    """Return chunks cut from the package's passages, and a question made of its questions.

    selector, name: as for `to_chunks`.
    """
    real = load_real_texts()

    def count_tokens(text: str) -> int:
        return len(encoder.chunk(text))

    passages = Cutter(rng, real.passages, count_tokens, SEPARATOR)
    questions = Cutter(rng, real.questions, count_tokens, " ")
    cut = [passages.cut(chunk_tokens) for _ in range(chunks)]
    texts = Texts(
        to_chunks(cut, selector=selector, name=name, separator=SEPARATOR),
        questions.cut(question_tokens),
        most_tokens=0,
        separator=SEPARATOR,
    )
    # In another order, a chunk's last token may be joined with the separator, or not.
    most = len(texts.prompt().encode(encoder).token_ids) + chunks
    return replace(texts, most_tokens=most)


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


@dataclass(frozen=True)
class RagWorkload:
    """Requests over documents, for the load generators of others.

    documents: the passages of each. prompts: of the requests.
    """

    documents: Mapping[str, Sequence[str]]
    prompts: Sequence[str]

    @classmethod
    def draw(cls, requests: int, chunks: int) -> RagWorkload:
        """Return ``requests`` prompts, each with ``chunks`` passages of real text and a question.

        How often a passage occurs follows Zipf's law; passages stand in random order.
        Raises ConfigError for more passages in a prompt than there are.
        """
        if chunks > DOCUMENTS * PASSAGES:
            raise ConfigError(f"--chunks {chunks} must be at most {DOCUMENTS * PASSAGES}")
        rng, real = random.Random(SEED), load_real_texts()
        cutter = Cutter(rng, real.passages, lambda text: len(text.split()), SEPARATOR)
        documents = {
            f"bench-{number}": [cutter.cut(WORDS) for _ in range(PASSAGES)]
            for number in range(DOCUMENTS)
        }
        passages = [one for some in documents.values() for one in some]
        rng.shuffle(passages)
        weights = zipf_weights(len(passages), 1.0)
        prompts = [
            SEPARATOR.join(
                [
                    *(passages[rank] for rank in draw_ranks(rng, weights, chunks)),
                    f"Question: {rng.choice(real.questions)}\nAnswer:",
                ]
            )
            for _ in range(requests)
        ]
        return cls(documents, prompts)

    def save(self, folder: Path) -> None:
        """Write ``requests.jsonl``, and in ``documents/`` what a server stores of each; OSError."""
        (folder / "documents").mkdir(parents=True, exist_ok=True)
        for name, passages in self.documents.items():
            (folder / "documents" / name).write_text(json.dumps({"chunks": passages}))
        with (folder / "requests.jsonl").open("w") as file:
            for prompt in self.prompts:
                line = json.dumps({"prompt": prompt, "output_tokens": OUTPUT_TOKENS})
                file.write(f"{line}\n")


def zipf_weights(count: int, exponent: float) -> list[float]:
    """Return cumulative weights of ranks 1 to ``count`` by Zipf's law, for ``draw_ranks``."""
    return [*accumulate(1 / rank**exponent for rank in range(1, count + 1))]


def draw_ranks(rng: random.Random, weights: Sequence[float], count: int) -> tuple[int, ...]:
    """Return distinct ranks from 0 on, in the order in which they were drawn."""
    found: dict[int, None] = {}
    while len(found) < count:
        found[rng.choices(range(len(weights)), cum_weights=weights)[0]] = None
    return tuple(found)
