"""The settings of the corpus: what was retrieved, and where the answer is decided.

Each drawing function returns a `Draw` from a generator, a shape and whether its subjects are held
out of training; equal generators give equal draws.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from cacheblend_rag.demo.corpus.documents import (
    Asked,
    Subject,
    document_id,
    draw_documents,
    draw_kinds,
    draw_subjects,
    fill_chunk,
    write_documents,
)
from cacheblend_rag.demo.corpus.prompt import UNKNOWN, DemoDocument, DemoQuestion
from cacheblend_rag.demo.corpus.sentences import DEFINITIONS, ROSTERS, estimate_tokens
from cacheblend_rag.demo.corpus.shape import CorpusShape
from cacheblend_rag.demo.corpus.subjects import COMPANY_NAMES, KINDS

Place = tuple[int, int]


@dataclass(frozen=True)
class Draw:
    """Documents of one prompt, with questions in random order.

    Attributes:
        documents: all of them, retrieved or not.
        retrieved: the retrieved chunks as (document, chunk) indices, in prompt order.
        questions: what the setting asks.
        others: further questions with an answer in the prompt, for training.
    """

    documents: list[DemoDocument]
    retrieved: list[Place]
    questions: list[DemoQuestion]
    others: list[DemoQuestion]


def draw_adjacent(rng: random.Random, shape: CorpusShape, held_out: bool) -> Draw:
    """Draw whole documents, in order."""
    documents, questions = draw_documents(rng, shape, held_out=held_out)
    return Draw(documents, _all_places(documents), questions, [])


def draw_fragments(rng: random.Random, shape: CorpusShape, held_out: bool) -> Draw:
    """Draw only chunks that refer back, and questions about them."""
    drawn = draw_adjacent(rng, shape, held_out)
    return Draw(
        drawn.documents,
        [(d, c) for d, c in drawn.retrieved if c > 0],
        [question for question in drawn.questions if question.kind == "referring"],
        [],
    )


def draw_linked(rng: random.Random, shape: CorpusShape, held_out: bool) -> Draw:
    """Draw documents that know people by another name only, after one that says whose it is.

    Questions ask by the people's own names.
    """
    kind = rng.choice([kind for kind in KINDS if kind.first_names != COMPANY_NAMES])
    kinds = [kind] * (rng.randint(*shape.documents) - 1)
    people = draw_subjects(rng, shape, kinds, held_out=held_out)
    aliases = rng.sample(COMPANY_NAMES[: shape.names[0]], len(people))
    (low, high), (shortest, longest) = shape.total_chunks, shape.context_tokens
    smaller = replace(
        shape,
        total_chunks=(low - 2, high - 2),
        context_tokens=(shortest * (low - 2) // max(low, 1), longest * (high - 2) // high),
    )
    subjects = [
        Subject(alias, kind, person.name, always_named=True)
        for person, alias in zip(people, aliases, strict=True)
    ]
    documents, asked = write_documents(rng, smaller, subjects)
    documents.insert(0, _roster(rng, subjects, documents))
    questions = [
        replace(each.question, kind="referring", document=each.question.document + 1)
        for each in asked
    ]
    return Draw(documents, _all_places(documents), questions, [])


def _roster(
    rng: random.Random, subjects: Sequence[Subject], documents: Sequence[DemoDocument]
) -> DemoDocument:
    """A document of two chunks as long as those of the others: who is known by which name."""
    lengths = [estimate_tokens(chunk) for document in documents for chunk in document.chunks]
    sentences = [
        rng.choice(DEFINITIONS).format(name=subject.asked_as, alias=subject.name)
        for subject in subjects
    ]
    rng.shuffle(sentences)
    half, tokens = (len(sentences) + 1) // 2, sum(lengths) / len(lengths)
    chunks = (
        fill_chunk(rng, [rng.choice(ROSTERS)], sentences[:half], tokens),
        fill_chunk(rng, [], sentences[half:], tokens),
    )
    return DemoDocument(document_id(rng, "people"), chunks)


def draw_revised(rng: random.Random, shape: CorpusShape, held_out: bool) -> Draw:
    """Draw documents of which one or two revise facts of others; what is revised is asked.

    A revision says so in its first chunk and may stand before what it revises.
    """
    kinds = draw_kinds(rng, shape)
    revisions = 2 if len(kinds) > 4 else 1
    subjects = draw_subjects(rng, shape, kinds[revisions:], held_out=held_out)
    revised = [replace(subject, revises=True) for subject in rng.sample(subjects, revisions)]
    order = [*subjects, *revised]
    rng.shuffle(order)
    documents, asked = write_documents(rng, shape, order)
    new = [each for each in asked if each.subject.revises]
    changed = {(each.subject.name, each.fact.attribute) for each in new}
    old = [each for each in asked if (each.subject.name, each.fact.attribute) not in changed]
    return Draw(
        documents,
        _all_places(documents),
        [each.question for each in new],
        [each.question for each in old],
    )


def draw_unanswerable(rng: random.Random, shape: CorpusShape, held_out: bool) -> Draw:
    """Draw documents of which one, and the last chunk of another, were not retrieved.

    No chunk that was retrieved stands after a missing one in its document, so that no KV has seen
    what is missing. What is missing is asked: its answer is `UNKNOWN`.
    """
    drawn = draw_adjacent(rng, shape, held_out)
    absent, cut = rng.sample(range(len(drawn.documents)), 2)
    last = (cut, len(drawn.documents[cut].chunks) - 1)
    missing = [place for place in drawn.retrieved if place[0] == absent or place == last]
    hidden = [q for q in drawn.questions if (q.document, q.chunk) in missing]
    return Draw(
        drawn.documents,
        [place for place in drawn.retrieved if place not in missing],
        [replace(question, answer=UNKNOWN) for question in hidden],
        [question for question in drawn.questions if question not in hidden],
    )


def draw_turns(rng: random.Random, shape: CorpusShape, held_out: bool) -> Draw:
    """Draw whole documents, and questions that say "she" for whom the one before them named."""
    subjects = draw_subjects(rng, shape, draw_kinds(rng, shape), held_out=held_out)
    documents, asked = write_documents(rng, shape, subjects)
    questions = [_after_another(rng, each, asked) for each in asked]
    return Draw(documents, _all_places(documents), questions, [])


def _after_another(rng: random.Random, asked: Asked, every: Sequence[Asked]) -> DemoQuestion:
    """The question, by pronoun, after another one about the same subject and its answer."""
    same = [each for each in every if each.subject == asked.subject and each != asked]
    before = rng.choice(same).question
    question = asked.fact.attribute.question_by_pronoun(asked.subject.kind.pronoun)
    earlier = ((before.question, before.answer),)
    return replace(asked.question, question=question, earlier=earlier)


def _all_places(documents: Sequence[DemoDocument]) -> list[Place]:
    return [(d, c) for d, document in enumerate(documents) for c in range(len(document.chunks))]


DRAWS: dict[str, Callable[[random.Random, CorpusShape, bool], Draw]] = {
    "adjacent": draw_adjacent,
    "fragments": draw_fragments,
    "shuffled": draw_adjacent,
    "linked": draw_linked,
    "revised": draw_revised,
    "unanswerable": draw_unanswerable,
    "turns": draw_turns,
}
SETTINGS = tuple(DRAWS)
LEARNED_SETTINGS = ("adjacent", "fragments", "shuffled")
"""Those that the bundled weights were trained on."""
