"""Cuts the chunks and the question of a benchmark out of real text, in a model's tokens."""

from __future__ import annotations

import random
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from cacheblend_rag.bench.workload import Texts, sentences_of, to_chunks
from cacheblend_rag.demo.passages import load_real_texts
from cacheblend_rag.text.encoder import PromptEncoder
from cacheblend_rag.text.instructed import SEPARATOR

PARAGRAPH = 4
"""Sentences together, when they come again."""
_WORD = re.compile(r"\S+")


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
