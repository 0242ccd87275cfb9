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
import random
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, islice

from cacheblend_rag.errors import ConfigError, DatasetError
from cacheblend_rag.quality.dataset import EvalDataset, EvalQuestion
from cacheblend_rag.quality.metrics import holds_answer
from cacheblend_rag.text.chunk import Chunk, Document

logger = logging.getLogger(__name__)

ADJACENT, FRAGMENTS, SHUFFLED = CUT_SETTINGS = ("adjacent", "fragments", "shuffled")
CountTokens = Callable[[str], int]

_END = re.compile(r"[.!?][\"')\]\u201d\u2019]*\s+|\n\s*\n")
_LAST_WORD = re.compile(r"(\w+)[.]$")
_ABBREVIATIONS = re.compile(
    "dr|mr|mrs|ms|st|jr|sr|co|inc|ltd|corp|prof|gen|col|capt|lt|sgt|rev|hon|gov|sen|rep|vs|no|vol|"
    "ca|approx|dept|est|fig|eg|ie|etc|jan|feb|mar|apr|jun|jul|aug|sep|sept|oct|nov|dec"
)
_PIECES = re.compile(r"\w+|[^\w\s]")

MINIMUM_CHUNKS = 2
"""Of a document, as long as there is text to lengthen it with."""
MOST_OTHERS = 300
"""Texts of other questions that are considered for one."""


def estimate_tokens(text: str) -> int:
    """Return about how many tokens a text has, for where no tokenizer is at hand.

    It counts words and punctuation marks, and adds a fifth: tokenizers split some words.
    """
    return round(1.2 * len(_PIECES.findall(text)))


@dataclass(frozen=True)
class Cutting:
    """How documents are cut, and how many of them a question has.

    Args:
        chunk_tokens: about how many tokens a chunk has; chunks end with sentences.
        prompt_tokens: the least and the most tokens that the chunks of a question's documents have
            together; None keeps the documents that the data set retrieved.
        count_tokens: tells how many tokens a text has.

    Raises:
        ConfigError: when a number is below 1, or the bounds are closer than two chunks.
    """

    chunk_tokens: int = 100
    prompt_tokens: tuple[int, int] | None = None
    count_tokens: CountTokens = estimate_tokens

    def __post_init__(self) -> None:
        if self.chunk_tokens < 1:
            raise ConfigError(f"chunk_tokens={self.chunk_tokens} must be at least 1")
        if self.prompt_tokens is None:
            return
        low, high = self.prompt_tokens
        if low < 1 or high < low + MINIMUM_CHUNKS * self.chunk_tokens:
            raise ConfigError(
                f"prompt_tokens={self.prompt_tokens} must be two numbers from 1, at least "
                f"{MINIMUM_CHUNKS} chunks of {self.chunk_tokens} tokens apart"
            )


def cut(
    dataset: EvalDataset,
    *,
    setting: str,
    cutting: Cutting = Cutting(),
    seed: int = 0,
    questions: int | None = None,
) -> EvalDataset:
    """Return the data set's questions over their documents, cut into chunks.

    setting: adjacent, fragments or shuffled. seed: for what is drawn; the same seed gives the same
    data. questions: at most so many; None for all. A question is left out if its documents do not
    fit the bounds, or if no chunk that holds its answer is retrieved; a warning says how many were.
    Raises ConfigError for an unknown setting, DatasetError when no question is left.
    """
    if setting not in CUT_SETTINGS:
        raise ConfigError(f"setting={setting!r} must be one of {', '.join(CUT_SETTINGS)}")
    cutter = _Cutter(dataset, cutting)
    made = (
        _cut_question(question, index, seed, setting, cutter)
        for index, question in enumerate(dataset.questions)
    )
    found = tuple(islice((question for question in made if question), questions))
    if len(found) < min(questions or len(dataset.questions), len(dataset.questions)):
        logger.warning(
            "%s, %s: %d of %d questions can be used; of the others, the documents with the answer "
            "do not fit into prompt_tokens=%s, or no retrieved chunk holds the answer",
            dataset.name,
            setting,
            len(found),
            len(dataset.questions),
            cutting.prompt_tokens,
        )
    if not found:
        raise DatasetError(
            f"{dataset.name}: no question fits setting={setting!r}, "
            f"chunk_tokens={cutting.chunk_tokens}, prompt_tokens={cutting.prompt_tokens}: "
            "change the chunks' or the prompt's length"
        )
    return replace(dataset, questions=found)


def _cut_question(
    question: EvalQuestion, index: int, seed: int, setting: str, cutter: _Cutter
) -> EvalQuestion | None:
    made = cutter.documents(question, index, random.Random(f"{seed} {index}"))
    if made is None:
        return None
    documents, gold = made
    rng = random.Random(f"{seed} {index} {setting}")
    passages = tuple(_retrieve(setting, documents, gold, rng))
    found = replace(question, passages=passages, documents=documents, setting=setting, gold=gold)
    return found if _can_be_answered(found) else None


def _retrieve(
    setting: str, documents: Sequence[Document], gold: Collection[Chunk], rng: random.Random
) -> list[Chunk]:
    by_document = [document.to_chunks() for document in documents]
    found = list(chain(*by_document))
    if setting == SHUFFLED:
        rng.shuffle(found)
    if setting != FRAGMENTS:
        return found
    found = []
    for chunks in by_document:
        later = chunks[1:] or chunks
        drawn = rng.sample(later, rng.randint(1, len(later)))
        found += [chunk for chunk in later if chunk in drawn or chunk in gold]
    return found


@dataclass(frozen=True)
class _Part:
    """A document's chunks; gold: the indices of those that hold the answer."""

    chunks: tuple[str, ...]
    gold: tuple[int, ...] = ()

    def up_to_gold(self) -> _Part:
        """Return the part without the chunks after the last one that holds the answer."""
        return replace(self, chunks=self.chunks[: max(MINIMUM_CHUNKS, max(self.gold) + 1)])


class _Cutter:
    """Makes the documents of questions of one data set."""

    def __init__(self, dataset: EvalDataset, cutting: Cutting) -> None:
        self._cutting = cutting
        texts = (_text(document) for q in dataset.questions for document in _retrieved(q))
        self._texts = list(dict.fromkeys(texts))

    def documents(
        self, question: EvalQuestion, index: int, rng: random.Random
    ) -> tuple[tuple[Document, ...], tuple[Chunk, ...]] | None:
        """Return documents, and their gold chunks; None if they cannot be made to fit."""
        others = self._others(question, rng)
        own = [self._part(document, question, others) for document in _retrieved(question)]
        bounds = self._cutting.prompt_tokens
        named = bool(question.gold)
        parts = self._fitted(own, others, bounds, rng, named=named) if bounds else own
        if parts is None:
            return None
        documents = tuple(Document(f"{index}-{i}", part.chunks) for i, part in enumerate(parts))
        gold = (
            document.to_chunks()[place]
            for document, part in zip(documents, parts, strict=True)
            for place in part.gold
        )
        return documents, tuple(gold)

    def _others(self, question: EvalQuestion, rng: random.Random) -> Iterator[str]:
        """Yield texts that are not the question's and do not hold its answer, in random order."""
        own = {_text(document) for document in question.documents}
        for text in rng.sample(self._texts, min(len(self._texts), MOST_OTHERS)):
            if text not in own and not holds_answer(text, question.answers):
                yield text

    def _part(self, document: Document, question: EvalQuestion, others: Iterator[str]) -> _Part:
        chunks = self._cut(_text(document))
        return _Part(self._lengthened(chunks, others), _gold_places(chunks, document, question))

    def _fitted(
        self,
        own: Sequence[_Part],
        others: Iterator[str],
        bounds: tuple[int, int],
        rng: random.Random,
        *,
        named: bool,
    ) -> list[_Part] | None:
        """Return the parts with gold and as many others as the bounds ask, in random order.

        named: whether the data set names the gold passages, so that all of them are needed. If not,
        they are those that contain the answer, and as many as fit will do.
        """
        low, high = bounds
        wished = rng.randint(low, high - MINIMUM_CHUNKS * self._cutting.chunk_tokens)
        gold = [part for part in own if part.gold]
        if self._tokens(gold) > high:
            gold = [part.up_to_gold() for part in gold]
        found = gold if named else self._first_fitting(gold, high)
        if gold and not found:
            return None
        others_own = (part for part in own if not part.gold)
        added = (_Part(self._lengthened(self._cut(text), others)) for text in others)
        total = self._tokens(found)
        for part in chain(others_own, added):
            if total >= wished:
                break
            shortened = self._shortened(part, high - total)
            if len(shortened.chunks) >= MINIMUM_CHUNKS:
                found.append(shortened)
                total += self._tokens([shortened])
        rng.shuffle(found)
        return found if low <= total <= high else None

    def _lengthened(self, chunks: tuple[str, ...], others: Iterator[str]) -> tuple[str, ...]:
        while len(chunks) < MINIMUM_CHUNKS and (text := next(others, None)):
            chunks += self._cut(text)[:1]
        return chunks

    def _first_fitting(self, parts: Sequence[_Part], most: int) -> list[_Part]:
        """Return parts of at most so many tokens together, the first ones first."""
        found: list[_Part] = []
        for part in parts:
            if self._tokens([*found, part]) <= most:
                found.append(part)
        return found

    def _shortened(self, part: _Part, most: int) -> _Part:
        """Return the part's first chunks, at most so many tokens."""
        lengths = accumulate(self._cutting.count_tokens(chunk) for chunk in part.chunks)
        return replace(part, chunks=part.chunks[: sum(length <= most for length in lengths)])

    def _cut(self, text: str) -> tuple[str, ...]:
        return cut_text(text, self._cutting.chunk_tokens, self._cutting.count_tokens)

    def _tokens(self, parts: Sequence[_Part]) -> int:
        return sum(self._cutting.count_tokens(chunk) for part in parts for chunk in part.chunks)


def _retrieved(question: EvalQuestion) -> list[Document]:
    """Return the documents that passages are chunks of, in order of first appearance."""
    documents = {document.document_id: document for document in question.documents}
    names = dict.fromkeys(str(passage.document_id) for passage in question.passages)
    return [documents[name] for name in names]


def _text(document: Document) -> str:
    return document.separator.join(document.chunks)


def _gold_places(
    chunks: Sequence[str], document: Document, question: EvalQuestion
) -> tuple[int, ...]:
    """Return which chunks hold the answer; all of a gold document in which it is not found."""
    is_gold = any(chunk.document_id == document.document_id for chunk in question.gold)
    if question.gold and not is_gold:
        return ()
    places = tuple(i for i, text in enumerate(chunks) if holds_answer(text, question.answers))
    return places or (tuple(range(len(chunks))) if is_gold else ())


def _can_be_answered(question: EvalQuestion) -> bool:
    """Whether a passage holds the answer, if any chunk does, or else a gold chunk is retrieved."""
    if question.setting != FRAGMENTS:
        return True
    holding = [chunk for chunk in question.gold if holds_answer(chunk.text, question.answers)]
    return any(chunk in question.passages for chunk in holding or question.gold)


def split_sentences(text: str) -> list[str]:
    """Return a text's sentences without the white space around them.

    A full stop after a single letter, a common abbreviation, or between digits ends none; a blank
    line does.
    """
    sentences, start = [], 0
    for end in _END.finditer(text):
        if _ends_sentence(text[start : end.end()].rstrip(), text[end.end() : end.end() + 1]):
            sentences.append(text[start : end.end()].strip())
            start = end.end()
    sentences.append(text[start:].strip())
    return [sentence for sentence in sentences if sentence]


def cut_text(text: str, chunk_tokens: int, count_tokens: CountTokens) -> tuple[str, ...]:
    """Return the text in chunks that end with sentences, as equal in length as these allow.

    chunk_tokens: about how many a chunk has; a sentence that is longer is a chunk by itself.
    """
    sentences = split_sentences(text)
    lengths = [count_tokens(sentence) for sentence in sentences]
    total = sum(lengths)
    count = max(1, round(total / chunk_tokens))
    chunks: list[list[str]] = [[] for _ in range(count)]
    for sentence, length, end in zip(sentences, lengths, accumulate(lengths), strict=True):
        chunks[int((end - length / 2) * count / total)].append(sentence)
    return tuple(" ".join(chunk) for chunk in chunks if chunk)


def _ends_sentence(sentence: str, following: str) -> bool:
    word = _LAST_WORD.search(sentence)
    if word is None:
        return True
    last = word[1].lower()
    if last.isdigit():
        return not following.isdigit()
    return len(last) > 1 and not _ABBREVIATIONS.fullmatch(last)
