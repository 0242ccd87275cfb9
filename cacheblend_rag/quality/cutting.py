"""Cuts any data set's documents into chunks, in the settings adjacent, fragments and shuffled.

A question's documents are the same in every setting, so that settings can be compared. They are the
data set's own; one that is shorter than two chunks is lengthened with text of other questions, and
other questions' documents are added up to the wished length of the prompt. None of the text that is
added holds the answer. What is retrieved of them:

- ``adjacent``: whole documents, one after another, their chunks in order.
- ``fragments``: some chunks of each document, in order, those with the answer always, but not its
  first one, which tells what the document is about; of a document with one chunk, this one.
- ``shuffled``: all chunks in random order.
"""

from __future__ import annotations

import logging
import math
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, islice
from typing import Annotated, Any, ClassVar, Self

from pydantic import BeforeValidator, model_validator

from cacheblend_rag.errors import ConfigError, DatasetError
from cacheblend_rag.quality.dataset import EvalDataset, EvalQuestion
from cacheblend_rag.quality.measure import ANSWER_TOKENS
from cacheblend_rag.quality.scores import holds_answer
from cacheblend_rag.settings.base import AsTuple, Positive, Settings
from cacheblend_rag.text.chunk import Chunk, Document

logger = logging.getLogger(__name__)

ADJACENT, FRAGMENTS, SHUFFLED = CUT_SETTINGS = ("adjacent", "fragments", "shuffled")
CountTokens = Callable[[str], int]
CHUNK_TOKENS = 100
MINIMUM_CHUNKS = 2
"""Of a document, as long as there is text to lengthen it with."""
MOST_OTHERS = 300
"""Texts of other questions that are considered for one."""
_SENTENCE_END = re.compile(r"(?:(?<=[.!?])|(?<=[.!?][\"')\]\u201d\u2019]))\s+(?=[^a-z\s])|\n\s*\n")
_PIECES = re.compile(r"\w+|[^\w\s]")


def estimate_tokens(text: str) -> int:
    """Return about how many tokens a text has, for where no tokenizer is at hand.

    It counts words and punctuation marks, and adds a fifth: tokenizers split some words.
    """
    return round(1.2 * len(_PIECES.findall(text)))


def _names(value: Any) -> Any:
    return tuple(filter(None, value.split(","))) if isinstance(value, str) else value


class QuestionSettings(Settings):
    """How questions are taken from a file, and answered."""

    _noun: ClassVar[str] = "setting of questions"

    settings: Annotated[tuple[str, ...], AsTuple, BeforeValidator(_names)] = ()
    """Those of the data set, or of cut documents (``adjacent``, ``fragments``, ``shuffled``), to
    take; all of them by default."""
    chunk_tokens: Positive | None = None
    """Cut the documents into chunks of about so many tokens, which end with sentences; of 100 if
    only ``prompt_tokens`` is given."""
    prompt_tokens: Annotated[tuple[Positive, ...] | None, AsTuple] = None
    """The least and the most tokens of the chunks of a question's documents together; by default
    those that the data set retrieved."""
    max_tokens: Positive = ANSWER_TOKENS
    """Most tokens of an answer."""

    @model_validator(mode="after")
    def _has_room(self) -> Self:
        if self.prompt_tokens is not None and len(self.prompt_tokens) != 2:
            told = ",".join(map(str, self.prompt_tokens))
            raise ConfigError(f"prompt_tokens={told} must be two numbers, such as 2000,2400")
        low, high = self.prompt_tokens or (0, math.inf)
        if high < low + MINIMUM_CHUNKS * self.chunk_size:
            raise ConfigError(
                f"prompt_tokens={self.prompt_tokens} must be at least {MINIMUM_CHUNKS} chunks of "
                f"{self.chunk_size} tokens apart"
            )
        return self

    @property
    def cuts(self) -> bool:
        """Whether documents are cut."""
        return self.chunk_tokens is not None or self.prompt_tokens is not None

    @property
    def chunk_size(self) -> int:
        """About how many tokens a chunk has."""
        return self.chunk_tokens or CHUNK_TOKENS


def cut(
    data: EvalDataset,
    setting: str,
    how: QuestionSettings,
    questions: int | None = None,
    count_tokens: CountTokens = estimate_tokens,
) -> EvalDataset:
    """Return at most so many of a data set's questions over their documents, cut into chunks.

    setting: adjacent, fragments or shuffled. A question is left out if its documents do not fit the
    bounds, or if no chunk that holds its answer is retrieved; a warning says how many were.
    Raises ConfigError for an unknown setting, DatasetError when no question is left.
    """
    if setting not in CUT_SETTINGS:
        raise ConfigError(f"setting={setting!r} must be one of {', '.join(CUT_SETTINGS)}")
    texts = [_text(one) for question in data.questions for one in _retrieved(question)]
    texts = list(dict.fromkeys(texts))
    cutter = _Cutter(texts, how, count_tokens)
    made = (cutter.cut(*asked, setting) for asked in enumerate(data.questions))
    found = tuple(islice(filter(None, made), questions))
    if not found:
        raise DatasetError(
            f"{data.name}: no question fits setting={setting!r}, chunk_tokens="
            f"{how.chunk_size}, prompt_tokens={how.prompt_tokens}: change a length"
        )
    if len(found) < min(questions or len(data.questions), len(data.questions)):
        logger.warning(
            "%s, %s: %d of %d questions can be used; of the others, the documents with the answer "
            "do not fit into prompt_tokens=%s, or no retrieved chunk holds the answer",
            data.name,
            setting,
            len(found),
            len(data.questions),
            how.prompt_tokens,
        )
    return replace(data, questions=found)


@dataclass(frozen=True)
class _Part:
    """A document's chunks; gold: the indices of those that hold the answer."""

    chunks: tuple[str, ...]
    gold: tuple[int, ...] = ()

    def searched(self, answers: Sequence[str], *, is_gold: bool) -> _Part:
        """Return it with its gold chunks: those with the answer, or all of a gold document."""
        held = tuple(i for i, one in enumerate(self.chunks) if holds_answer(one, answers))
        return replace(self, gold=held or (tuple(range(len(self.chunks))) if is_gold else ()))


@dataclass(frozen=True)
class _Cutter:
    """Cuts the documents of questions. texts: of all questions."""

    texts: Sequence[str]
    how: QuestionSettings
    count_tokens: CountTokens

    def cut(self, index: int, question: EvalQuestion, setting: str) -> EvalQuestion | None:
        """Return the question over its cut documents; None if it cannot be asked so."""
        parts = self._parts(question, random.Random(f"0 {index}"))
        documents = tuple(Document(f"{index}-{i}", part.chunks) for i, part in enumerate(parts))
        chunks = [document.to_chunks() for document in documents]
        gold = tuple(own[i] for own, part in zip(chunks, parts, strict=True) for i in part.gold)
        passages = tuple(_retrieve(setting, chunks, gold, random.Random(f"0 {index} {setting}")))
        holding = [chunk for chunk in gold if holds_answer(chunk.text, question.answers)] or gold
        lacks_answer = setting == FRAGMENTS and not any(chunk in passages for chunk in holding)
        if not parts or lacks_answer:
            return None
        return replace(question, passages=passages, documents=documents, setting=setting, gold=gold)

    def _parts(self, question: EvalQuestion, rng: random.Random) -> list[_Part]:
        """Return the documents with the answer, then as many others as the bounds ask, shuffled.

        Without bounds, the question's own ones. None at all if the bounds cannot be kept, or if a
        document that the data set calls gold does not fit.
        """
        others = self._others(question, rng)
        named = {chunk.document_id for chunk in question.gold}
        own = []
        for document in _retrieved(question):
            part = self._part(_text(document), others)
            is_gold = document.document_id in named
            if is_gold or not named:
                part = part.searched(question.answers, is_gold=is_gold)
            own.append(part)
        if self.how.prompt_tokens is None:
            return own
        low, high = self.how.prompt_tokens
        wished = rng.randint(low, high - MINIMUM_CHUNKS * self.how.chunk_size)
        own.sort(key=lambda part: not part.gold)
        found: list[_Part] = []
        total = 0
        for part in chain(own, (self._part(text, others) for text in others)):
            if total >= wished and not part.gold:
                break
            lengths = list(accumulate(map(self.count_tokens, part.chunks)))
            fitting = sum(length <= high - total for length in lengths)
            if fitting >= max(MINIMUM_CHUNKS, *(place + 1 for place in part.gold), 0):
                found.append(replace(part, chunks=part.chunks[:fitting]))
                total += lengths[fitting - 1]
            elif part.gold and named:
                return []
        rng.shuffle(found)
        lacks_gold = bool(own[0].gold) and not any(part.gold for part in found)
        return [] if total < low or lacks_gold else found

    def _part(self, text: str, others: Iterator[str]) -> _Part:
        """Return a document in chunks, at least two as long as there is text to lengthen it."""
        size = self.how.chunk_size
        chunks = cut_text(text, size, self.count_tokens)
        while len(chunks) < MINIMUM_CHUNKS and (more := next(others, None)):
            chunks += cut_text(more, size, self.count_tokens)[:1]
        return _Part(chunks)

    def _others(self, question: EvalQuestion, rng: random.Random) -> Iterator[str]:
        """Yield texts that are not the question's and do not hold its answer, in random order."""
        own = {_text(document) for document in question.documents}
        for text in rng.sample(self.texts, min(len(self.texts), MOST_OTHERS)):
            if text not in own and not holds_answer(text, question.answers):
                yield text


def _retrieve(
    setting: str,
    documents: Sequence[Sequence[Chunk]],
    gold: Sequence[Chunk],
    rng: random.Random,
) -> list[Chunk]:
    found = list(chain(*documents))
    if setting == SHUFFLED:
        rng.shuffle(found)
    if setting != FRAGMENTS:
        return found
    found = []
    for chunks in documents:
        later = chunks[1:] or chunks
        drawn = rng.sample(later, rng.randint(1, len(later)))
        found += [chunk for chunk in later if chunk in drawn or chunk in gold]
    return found


def _retrieved(question: EvalQuestion) -> list[Document]:
    """Return the documents that passages are chunks of, in order of first appearance."""
    documents = {document.document_id: document for document in question.documents}
    names = dict.fromkeys(str(passage.document_id) for passage in question.passages)
    return [documents[name] for name in names]


def _text(document: Document) -> str:
    return document.separator.join(document.chunks)


def cut_text(text: str, chunk_tokens: int, count_tokens: CountTokens) -> tuple[str, ...]:
    """Return the text in chunks that end with sentences, as equal in length as these allow.

    chunk_tokens: about how many a chunk has; a sentence that is longer is a chunk by itself.
    """
    sentences = [one.strip() for one in _SENTENCE_END.split(text) if one.strip()]
    lengths = [count_tokens(sentence) for sentence in sentences]
    total = sum(lengths)
    count = max(1, round(total / chunk_tokens))
    chunks: list[list[str]] = [[] for _ in range(count)]
    for sentence, length, end in zip(sentences, lengths, accumulate(lengths), strict=True):
        chunks[int((end - length / 2) * count / total)].append(sentence)
    return tuple(" ".join(chunk) for chunk in chunks if chunk)
