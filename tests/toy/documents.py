"""Draws documents about subjects that share their kinds of fact, and a question on each fact.

The order of draws is the one that the weights were trained with; some were for training alone.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .prompt import DemoDocument, DemoPrompt, DemoQuestion, QuestionKind
from .sentences import INTRODUCTIONS, OPENINGS, draw_filler, estimate_tokens
from .subjects import KINDS, Attribute, SubjectKind, is_held_out

SETTINGS = ("adjacent", "fragments", "shuffled")
REFERRING_SHARE = 0.75
Bounds = tuple[int, int]


@dataclass(frozen=True)
class Subject:
    """Whom a document is about: first and last name, and type."""

    name: str
    kind: SubjectKind


@dataclass(frozen=True)
class Fact:
    """A value, and what it is the value of."""

    attribute: Attribute
    value: str


def generate_prompts(setting: str, count: int, seed: int) -> list[DemoPrompt]:
    """Draw prompts of one question each, about subjects that training never drew.

    Args:
        setting: `adjacent` (whole documents in order), `fragments` (only the chunks that refer
            back, and only questions about them) or `shuffled` (all chunks in random order).
        count: how many prompts.
        seed: equal seeds give equal prompts.
    """
    rng = random.Random(f"prompts/{setting}/{seed}")
    return [_draw_prompt(rng, setting) for _ in range(count)]


def generate_collection(
    documents: int, questions: int, seed: int
) -> tuple[list[DemoDocument], list[DemoQuestion]]:
    """Draw one collection for retrieval, about subjects that differ in first and last name.

    A third each is about women, men and companies; a third's documents share their kinds of fact.
    Questions name their subject in full, and `question.document` indexes the collection.
    """
    rng = random.Random(f"collection/{documents}/{questions}/{seed}")
    kinds = [KINDS[index % len(KINDS)] for index in range(documents)]
    drawn, asked = _write_documents(
        rng,
        kinds,
        total_chunks=(2 * documents, 3 * documents),
        context_tokens=(240 * documents, 250 * documents),
    )
    return drawn, rng.sample(asked, questions)


def _draw_prompt(rng: random.Random, setting: str) -> DemoPrompt:
    count = rng.randint(4, 6)
    rng.random()
    kinds = [rng.choice(KINDS)] * count
    documents, questions = _write_documents(rng, kinds)
    retrieved = [
        (d, c) for d, document in enumerate(documents) for c in range(len(document.chunks))
    ]
    if setting == "fragments":
        retrieved = [(d, c) for d, c in retrieved if c > 0]
        questions = [question for question in questions if question.kind == "referring"]
    question = _choose(rng, questions)
    if setting == "shuffled":
        rng.shuffle(retrieved)
    return DemoPrompt(tuple(documents), tuple(retrieved), question, setting)


def _choose(rng: random.Random, questions: Sequence[DemoQuestion]) -> DemoQuestion:
    wanted = {question.kind for question in questions}
    if len(wanted) > 1:
        wanted.discard("direct" if rng.random() < REFERRING_SHARE else "referring")
    return next(question for question in questions if question.kind in wanted)


def _draw_subjects(rng: random.Random, kinds: Sequence[SubjectKind]) -> list[Subject]:
    """Draw subjects that differ in first and in last name while the pools last."""
    used: set[str] = set()
    subjects: list[Subject] = []
    for kind in kinds:
        pairs = [
            (first, last)
            for i, first in enumerate(kind.first_names)
            for j, last in enumerate(kind.last_names)
            if is_held_out(i, j) and first not in used
        ]
        fresh = [pair for pair in pairs if pair[1] not in used]
        pair = rng.choice(fresh or pairs)
        used.update(pair)
        subjects.append(Subject(" ".join(pair), kind))
    return subjects


def _write_documents(
    rng: random.Random,
    kinds: Sequence[SubjectKind],
    total_chunks: Bounds = (10, 14),
    context_tokens: Bounds = (1090, 1390),
) -> tuple[list[DemoDocument], list[DemoQuestion]]:
    """Write a document about a subject of each kind; questions come in random order.

    context_tokens: filler sentences are added until the chunks hold about so many tokens.
    """
    subjects = _draw_subjects(rng, kinds)
    facts = _draw_facts(rng, kinds)
    counts = _draw_chunk_counts(rng, total_chunks, len(subjects))
    chunk_tokens = rng.randint(*context_tokens) / sum(counts)
    rng.random()
    documents: list[DemoDocument] = []
    questions: list[DemoQuestion] = []
    for index, (subject, count) in enumerate(zip(subjects, counts, strict=True)):
        direct, referring = next(facts)
        plan = [direct, *_split(rng, referring, count - 1)]
        chunks = tuple(
            _chunk(rng, subject, part, position, chunk_tokens) for position, part in enumerate(plan)
        )
        slug = subject.name.lower().replace(" ", "-")
        documents.append(DemoDocument(f"{slug}-{rng.randrange(16**6):06x}", chunks))
        for position, part in enumerate(plan):
            for fact in part:
                text = rng.choice(fact.attribute.questions).format(name=subject.name)
                kind: QuestionKind = "referring" if position else "direct"
                questions.append(DemoQuestion(text, fact.value, kind, index, position))
    rng.shuffle(questions)
    return documents, questions


def _draw_facts(
    rng: random.Random, kinds: Sequence[SubjectKind]
) -> Iterator[tuple[list[Fact], list[Fact]]]:
    """Direct and referring facts a document: one choice of attributes a kind, distinct values."""
    direct, referring = rng.randint(1, 2), rng.randint(3, 4)
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


def _draw_chunk_counts(rng: random.Random, total: Bounds, documents: int) -> list[int]:
    while True:
        counts = [rng.randint(2, 3) for _ in range(documents)]
        if total[0] <= sum(counts) <= total[1]:
            return counts


def _split(rng: random.Random, facts: list[Fact], parts: int) -> list[list[Fact]]:
    """Cut a list at random places into parts that all hold something."""
    cuts = sorted(rng.sample(range(1, len(facts)), parts - 1))
    return [facts[i:j] for i, j in zip([0, *cuts], [*cuts, len(facts)], strict=True)]


def _chunk(
    rng: random.Random, subject: Subject, facts: Sequence[Fact], position: int, tokens: float
) -> str:
    """Write one passage: the introduction, then facts in order, and fillers between."""
    sentences = [_statement(rng, subject, fact, position) for fact in facts]
    opening: list[str] = []
    if position == 0:
        opening.append(rng.choice(INTRODUCTIONS).format(name=subject.name))
    length = sum(map(estimate_tokens, sentences + opening))
    while length < tokens - 6:
        filler = draw_filler(rng)
        sentences.insert(rng.randint(0, len(sentences)), filler)
        length += estimate_tokens(filler)
    return " ".join(opening + sentences)


def _statement(rng: random.Random, subject: Subject, fact: Fact, position: int) -> str:
    """Say a fact; only a first chunk may name its subject."""
    name, kind = subject.name, subject.kind
    named = not position and rng.random() < 0.5
    sentence = rng.choice(fact.attribute.statements).format(
        subject=name if named else kind.pronoun,
        possessive=f"{name}'s" if named else kind.possessive,
        value=fact.value,
    )
    if rng.random() < 0.2:
        return f"{rng.choice(OPENINGS)} {sentence}"
    return sentence[0].upper() + sentence[1:]
