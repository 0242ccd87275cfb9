"""Draws documents about subjects that share their kinds of fact, and a question on each fact."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .prompt import DemoDocument, DemoQuestion, QuestionKind
from .sentences import (
    INTRODUCTIONS,
    OPENINGS,
    REVISIONS,
    draw_filler,
    estimate_tokens,
)
from .shape import CorpusShape
from .subjects import KINDS, Attribute, SubjectKind, is_held_out


@dataclass(frozen=True)
class Subject:
    """Whom a document is about.

    Attributes:
        name: first and last name.
        kind: type of subject.
        revises: the document revises two facts of an earlier one.
    """

    name: str
    kind: SubjectKind
    revises: bool = False


@dataclass(frozen=True)
class Fact:
    """A value, and what it is the value of."""

    attribute: Attribute
    value: str


@dataclass(frozen=True)
class Asked:
    """A question with the subject and the fact that it is about."""

    question: DemoQuestion
    subject: Subject
    fact: Fact


def draw_documents(
    rng: random.Random, shape: CorpusShape, *, held_out: bool = False
) -> tuple[list[DemoDocument], list[DemoQuestion]]:
    """Draw the documents of one prompt and, in random order, a question on each of their facts."""
    subjects = draw_subjects(rng, shape, draw_kinds(rng, shape), held_out=held_out)
    documents, asked = write_documents(rng, shape, subjects)
    return documents, [each.question for each in asked]


def draw_kinds(rng: random.Random, shape: CorpusShape) -> list[SubjectKind]:
    """Draw the type of each document's subject; in most prompts all have the same type."""
    count = rng.randint(*shape.documents)
    if rng.random() < shape.mixed:
        return rng.choices(KINDS, k=count)
    return [rng.choice(KINDS)] * count


def draw_subjects(
    rng: random.Random, shape: CorpusShape, kinds: Sequence[SubjectKind], *, held_out: bool
) -> list[Subject]:
    """Draw subjects that differ in first and in last name while the pools last."""
    used: set[str] = set()
    subjects: list[Subject] = []
    for kind in kinds:
        pairs = [
            (first, last)
            for i, first in enumerate(kind.first_names[: shape.names[0]])
            for j, last in enumerate(kind.last_names[: shape.names[1]])
            if is_held_out(i, j) == held_out and first not in used
        ]
        fresh = [pair for pair in pairs if pair[1] not in used]
        pair = rng.choice(fresh or pairs)
        used.update(pair)
        subjects.append(Subject(" ".join(pair), kind))
    return subjects


def write_documents(
    rng: random.Random, shape: CorpusShape, subjects: Sequence[Subject]
) -> tuple[list[DemoDocument], list[Asked]]:
    """Write a document about each subject; questions come in random order."""
    facts = _draw_facts(rng, shape, [subject.kind for subject in subjects])
    counts = _draw_chunk_counts(rng, shape, len(subjects))
    chunk_tokens = rng.randint(*shape.context_tokens) / sum(counts)
    explicit = rng.random() < shape.explicit
    documents: list[DemoDocument] = []
    questions: list[Asked] = []
    for index, (subject, count) in enumerate(zip(subjects, counts, strict=True)):
        direct, referring = next(facts)
        plan = [direct, *_split(rng, referring, count - 1)]
        if subject.revises:
            plan = [[fact] for fact in rng.sample([*direct, *referring], 2)]
        writer = _Writer(rng, shape, subject, explicit)
        chunks = tuple(
            writer.chunk(part, position, chunk_tokens) for position, part in enumerate(plan)
        )
        documents.append(DemoDocument(f"{_slug(subject.name)}-{rng.randrange(16**6):06x}", chunks))
        for position, part in enumerate(plan):
            for fact in part:
                text = writer.question(fact.attribute)
                kind: QuestionKind = "referring" if position else "direct"
                question = DemoQuestion(text, fact.value, kind, index, position)
                questions.append(Asked(question, subject, fact))
    rng.shuffle(questions)
    return documents, questions


def _draw_facts(
    rng: random.Random, shape: CorpusShape, kinds: Sequence[SubjectKind]
) -> Iterator[tuple[list[Fact], list[Fact]]]:
    """Direct and referring facts a document: one choice of attributes a kind, distinct values."""
    direct, referring = rng.randint(*shape.direct_facts), rng.randint(*shape.referring_facts)
    chosen: dict[str, list[Attribute]] = {}
    values: dict[tuple[str, int], list[str]] = {}
    for kind in kinds:
        if kind.pronoun not in chosen:
            chosen[kind.pronoun] = rng.sample(kind.attributes, direct + referring)
        facts: list[Fact] = []
        for index, attribute in enumerate(chosen[kind.pronoun]):
            left = values.setdefault((kind.pronoun, index), [])
            if not left:
                left.extend(rng.sample(attribute.values, len(attribute.values)))
            facts.append(Fact(attribute, left.pop()))
        yield facts[:direct], rng.sample(facts[direct:], referring)


def _draw_chunk_counts(rng: random.Random, shape: CorpusShape, documents: int) -> list[int]:
    low, high = shape.total_chunks
    while True:
        counts = [rng.randint(*shape.chunks) for _ in range(documents)]
        if low <= sum(counts) <= high:
            return counts


def _split(rng: random.Random, facts: list[Fact], parts: int) -> list[list[Fact]]:
    """Cut a list at random places into parts that all hold something."""
    cuts = sorted(rng.sample(range(1, len(facts)), parts - 1))
    return [facts[i:j] for i, j in zip([0, *cuts], [*cuts, len(facts)], strict=True)]


@dataclass(frozen=True)
class _Writer:
    """Puts facts about one subject into words."""

    rng: random.Random
    shape: CorpusShape
    subject: Subject
    explicit: bool

    def question(self, attribute: Attribute) -> str:
        return self._choose(attribute.questions).format(name=self.subject.name)

    def chunk(self, facts: Sequence[Fact], position: int, tokens: float) -> str:
        """Write one passage: the introduction, then facts in order, and fillers between."""
        sentences = [self._statement(fact, position) for fact in facts]
        opening: list[str] = []
        if position == 0:
            opening.append(self._introduction())
        length = sum(map(estimate_tokens, sentences + opening))
        while length < tokens - 6:
            filler = draw_filler(self.rng)
            sentences.insert(self.rng.randint(0, len(sentences)), filler)
            length += estimate_tokens(filler)
        return " ".join(opening + sentences)

    def _introduction(self) -> str:
        wordings = REVISIONS if self.subject.revises else INTRODUCTIONS
        return self.rng.choice(wordings).format(name=self.subject.name)

    def _statement(self, fact: Fact, position: int) -> str:
        rng, name, kind = self.rng, self.subject.name, self.subject.kind
        named = self.explicit if position else rng.random() < 0.5
        sentence = self._choose(fact.attribute.statements).format(
            subject=name if named else kind.pronoun,
            possessive=f"{name}'s" if named else kind.possessive,
            value=fact.value,
        )
        if self.shape.wordings > 1 and rng.random() < 0.2:
            return f"{rng.choice(OPENINGS)} {sentence}"
        return sentence[0].upper() + sentence[1:]

    def _choose(self, wordings: tuple[str, ...]) -> str:
        return self.rng.choice(wordings[: self.shape.wordings])


def _slug(name: str) -> str:
    return name.lower().replace(" ", "-")
