"""Makes the prompts on which quality is measured, as a file of questions for `eval`.

``python -m tests.benchmarks.prompts needle --out needle.json`` writes questions of one kind:

- ``qa``: questions of a file among its other questions' documents;
- ``single-hop``: questions that one sentence answers, of the package and the file;
- ``needle``: which number one of many sentences tells that stand in other text (RULER's multi-key
  needle, arXiv 2404.06654);
- ``tracking``: the value of a variable that has another one's value (RULER's variable tracking);
- ``referring``: invented documents that refer to each other, see tests/benchmarks/referring.py.

Each question stands there in up to four settings over the same documents: ``adjacent`` has all
chunks in order, ``shuffled`` in random order, ``fragments`` in order some of each document: those
that the answer needs, and its first one, which tells what it is about, only if it is one of them.
``question-first`` is ``adjacent`` with the question before the passages, as where a tool returns
them.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, chain, count, islice, pairwise, repeat
from pathlib import Path
from statistics import mean

import typer

from cacheblend_rag import load_tokenizer
from cacheblend_rag.demo.passages import SINGLE_HOP, load_real_texts
from cacheblend_rag.errors import DatasetError
from cacheblend_rag.quality.dataset import EvalDataset, EvalQuestion
from cacheblend_rag.quality.questions import choose_questions, over_passages
from cacheblend_rag.quality.scores import holds_answer
from cacheblend_rag.text.chunk import Document
from tests.benchmarks.referring import TITLES, referring_documents

SETTINGS = ("adjacent", "fragments", "question-first", "shuffled")
ADJACENT, FRAGMENTS, FIRST, SHUFFLED = SETTINGS
SENTENCE_END = re.compile(r"(?:(?<=[.!?])|(?<=[.!?][\"')\]\u201d\u2019]))\s+(?=[^a-z\s])|\n\s*\n")
LOWER_CASE_END = re.compile(r"(?<=[^\s.]{3}[.!?])\s+|\n\s*\n")  # of text without capitals
DATE = r"\d{1,2} [A-Za-z]+ \d{4}|[A-Za-z]+ \d{1,2}, \d{4}"
BORN = re.compile(rf"(?!the )(?P<name>[^().,:;\"#]{{6,40}}) \( ?(?:born )?(?P<date>{DATE})\b")
DOCUMENT_CHUNKS = 4  # of a document that short passages are joined to
CHAIN_TOKENS = 500  # of the prompt for each needle or chain, of which there are at least four
ALL = 10**9
CountTokens = Callable[[str], int]


@dataclass(frozen=True)
class Draft:
    """A question over documents, which are lists of chunks.

    gold: the chunks that the answer needs, by document and chunk. is_referring: whether chunks
    cannot be told apart without their documents' first ones before them.
    """

    question: str
    answers: tuple[str, ...]
    documents: Sequence[Sequence[str]]
    gold: Sequence[tuple[int, int]]
    is_referring: bool = False

    def asked(self, index: int, rng: random.Random) -> Iterator[EvalQuestion]:
        """Yield the question in each setting that it has."""
        documents = tuple(
            Document(f"{index}-{at}", tuple(chunks)) for at, chunks in enumerate(self.documents)
        )
        chunks = [document.to_chunks() for document in documents]
        gold = tuple(chunks[document][chunk] for document, chunk in self.gold)
        whole = tuple(chain(*chunks))
        kept = set(gold) | ({own[0] for own in chunks} if self.is_referring else set())
        for later in (own[1:] or own for own in chunks):
            kept.update(rng.sample(later, rng.randint(1, len(later))))
        passages = {
            ADJACENT: whole,
            FRAGMENTS: tuple(chunk for chunk in whole if chunk in kept),
            FIRST: whole,
            SHUFFLED: tuple(rng.sample(whole, len(whole))),
        }
        for setting in SETTINGS[:3] if self.is_referring else SETTINGS:
            yield EvalQuestion(
                self.question,
                self.answers,
                passages[setting],
                documents,
                setting,
                gold,
                question_first=setting == FIRST,
            )


@dataclass(frozen=True)
class Drafts:
    """Drafts questions; its methods yield those of one kind, each from its own random numbers.

    data: the questions of the source. texts: other documents. prompt_tokens, chunk_tokens: about
    how many a prompt's documents and a chunk have.
    """

    data: EvalDataset
    texts: Sequence[str]
    prompt_tokens: int
    chunk_tokens: int
    count_tokens: CountTokens
    seed: int

    def qa(self) -> Iterator[Draft]:
        """Questions of the source whose answer stands in their documents, among all others."""
        for index, question in enumerate(self.data.questions):
            rng = self._rng("qa", index)
            own = list(map(_text, question.documents))
            named = {chunk.document_id for chunk in question.gold}
            golden = [_text(one) for one in question.documents if one.document_id in named]
            if not named:  # each that holds the answer is enough
                golden = [text for text in own if holds_answer(text, question.answers)]
                golden = rng.sample(golden, min(1, len(golden)))
            told = [one for text in golden for one in sentences(text)]
            held = [one for one in told if holds_answer(one, question.answers)]
            if not held:
                continue
            others = rng.sample(own, len(own)) + rng.sample(self.texts, len(self.texts))
            others = [text for text in others if not holds_answer(text, question.answers)]
            texts = self._filled(golden, others)
            rng.shuffle(texts)
            needed = told if named else held
            yield self._draft(question.question, question.answers, self._joined(texts), needed)

    def needle(self) -> Iterator[Draft]:
        """One of many numbers, each of which a sentence in other text tells under a name."""
        return map(self._chains, count(), repeat(0))

    def tracking(self) -> Iterator[Draft]:
        """The same where the sentence names another one with that number."""
        return map(self._chains, count(), repeat(1))

    def referring(self) -> Iterator[Draft]:
        """What invented documents tell that refer to each other."""
        for index in count():
            rng = self._rng("referring", index)
            sizes = self.prompt_tokens, self.chunk_tokens, self.count_tokens
            yield Draft(*referring_documents(rng, index, *sizes), is_referring=True)

    def _rng(self, kind: str, index: int) -> random.Random:
        return random.Random(f"{self.seed} {kind} {index}")

    def _filled(self, first: Sequence[str], others: Iterable[str]) -> list[str]:
        """Return texts, and of the others as many as there is room for; the last is shortened."""
        found = dict.fromkeys(first)
        room = self.prompt_tokens - sum(map(self.count_tokens, first))
        for text in others:
            if text not in found and self.count_tokens(text) > room:
                told = sentences(text)
                ends = accumulate(map(self.count_tokens, told))
                text = " ".join(one for one, end in zip(told, ends, strict=True) if end <= room)
            if text and text not in found:
                found[text] = None
                room -= self.count_tokens(text)
            if room * 50 < self.prompt_tokens:
                return list(found)
        raise DatasetError(f"--source has too little text: {room} tokens are missing")

    def _joined(self, texts: Sequence[str]) -> list[list[str]]:
        """Return documents of sentences: texts, of which short ones are joined to some chunks."""
        found: list[list[str]] = [[]]
        for told in map(sentences, texts):
            together = sum(map(self.count_tokens, found[-1] + told))
            if together > DOCUMENT_CHUNKS * self.chunk_tokens:
                found.append([])
            found[-1] += told
        return [document for document in found if document]

    def _chains(self, index: int, hops: int) -> Draft:
        """Return a question about the last name of one of several chains of names."""
        rng = self._rng(f"{hops} hops", index)
        numbers = rng.sample(range(10_000, 100_000), max(4, self.prompt_tokens // CHAIN_TOKENS))
        names = iter(rng.sample(TITLES, len(TITLES)))
        told = []
        for number in numbers:
            own = list(islice(names, hops + 1))
            told.append([f"The secret number of {own[0]} is {number}."])
            told[-1] += [
                f"The secret number of {two} is that of {one}." for one, two in pairwise(own)
            ]
        planted = list(chain(*told))
        texts = self._filled(planted, rng.sample(self.texts, len(self.texts)))[len(planted) :]
        documents = self._joined(texts)
        slots = [(at, end) for at, own in enumerate(documents) for end in range(1, len(own) + 1)]
        placed = [zip(sorted(rng.sample(slots, len(own))), own, strict=True) for own in told]
        for (at, end), one in sorted(chain(*placed), reverse=True):
            documents[at].insert(end, one)
        question = f"What is the secret number of {own[-1]}?"
        return self._draft(question, (str(number),), documents, told[-1])

    def _draft(
        self,
        question: str,
        answers: tuple[str, ...],
        texts: Sequence[Sequence[str]],
        needed: Sequence[str],
    ) -> Draft:
        """Return a question over texts of sentences. needed: those that make chunks gold."""
        documents = [cut(text, self.chunk_tokens, self.count_tokens) for text in texts]
        gold = [
            (at, place)
            for at, chunks in enumerate(documents)
            for place, chunk in enumerate(chunks)
            if any(one in chunk for one in needed)
        ]
        return Draft(question, answers, documents, gold)


KINDS = {
    "qa": Drafts.qa,
    SINGLE_HOP: Drafts.qa,
    "needle": Drafts.needle,
    "tracking": Drafts.tracking,
    "referring": Drafts.referring,
}


def main(
    kind: str,
    *,
    out: str = "prompts.json",
    source: str = SINGLE_HOP,
    model: str = "smollm2",
    questions: int = 30,
    skip: int = 0,
    prompt_tokens: int = 2000,
    chunk_tokens: int = 150,
    seed: int = 0,
) -> None:
    """Write questions of a kind; print how many there are of each setting, and their mean tokens.

    source: a file that `eval` reads; its questions for qa, its documents as other text elsewhere.
    model: its tokenizer counts tokens. questions: most of each setting. skip: how many to leave out
    before them, so that what is tuned on some is reported on others. prompt_tokens: of a prompt's
    documents. chunk_tokens: about how many a chunk has; chunks end with sentences. seed: another
    one makes other prompts.
    """
    if kind not in KINDS:
        raise typer.BadParameter(f"kind {kind!r} must be one of {', '.join(KINDS)}")
    tokenizer = load_tokenizer(model)
    count_tokens = cache(lambda text: len(tokenizer.tokenize(text)))
    data = choose_questions(source, ALL)
    texts = [] if kind == "qa" else list(load_real_texts().passages)
    texts += [_text(document) for asked in data.questions for document in asked.documents]
    texts = list(dict.fromkeys(texts))
    if kind == SINGLE_HOP:
        data = replace(data, questions=tuple(single_hop(texts)))
    drafts = Drafts(data, texts, prompt_tokens, chunk_tokens, count_tokens, seed)
    chosen = islice(enumerate(KINDS[kind](drafts)), skip, skip + questions)
    found = [
        asked
        for index, draft in chosen
        for asked in draft.asked(index, random.Random(f"{seed} {index}"))
    ]
    made = replace(data, name=f"{kind}-{prompt_tokens}", questions=tuple(found))
    made.save(Path(out))
    told = {
        setting: [sum(count_tokens(one.text) for one in asked.passages) for asked in own]
        for setting in made.settings
        if (own := made.of_setting(setting))
    }
    print(json.dumps({one: [len(own), round(mean(own))] for one, own in told.items()}))


def single_hop(texts: Iterable[str]) -> Iterator[EvalQuestion]:
    """Yield the packaged questions, but of dates only when each person that texts tell of was born.

    When they died is not asked: small models answer with the date of birth that stands before.
    """
    for one in choose_questions(SINGLE_HOP, ALL).questions:
        if not one.question.startswith("When"):
            yield one
    asked = set()
    for text in texts:
        for born in filter(None, map(BORN.match, sentences(text))):
            if born["name"].lower() not in asked:
                asked.add(born["name"].lower())
                question = f"When was {born['name']} born?"
                yield over_passages(question, (born["date"],), [Document("0", (text,))])


def sentences(text: str) -> list[str]:
    """Return the text's sentences."""
    end = LOWER_CASE_END if text == text.lower() else SENTENCE_END
    return [one.strip() for one in end.split(text) if one.strip()]


def cut(told: Sequence[str], chunk_tokens: int, count_tokens: CountTokens) -> list[str]:
    """Return sentences in chunks that are as equal in length as these allow."""
    lengths = [count_tokens(sentence) for sentence in told]
    total = sum(lengths)
    number = max(1, round(total / chunk_tokens))
    chunks: list[list[str]] = [[] for _ in range(number)]
    for sentence, length, end in zip(told, lengths, accumulate(lengths), strict=True):
        chunks[int((end - length / 2) * number / total)].append(sentence)
    return [" ".join(chunk) for chunk in chunks if chunk]


def _text(document: Document) -> str:
    return document.separator.join(document.chunks)


if __name__ == "__main__":
    typer.run(main)
