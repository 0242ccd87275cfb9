"""The settings of the corpus: what was retrieved, and where the answer is decided.

Each drawing function returns a `Draw` from a generator, a shape and whether its subjects are held
out of training; equal generators give equal draws.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from .documents import (
    Asked,
    draw_documents,
    draw_kinds,
    draw_subjects,
    write_documents,
)
from .prompt import UNKNOWN, DemoDocument, DemoQuestion
from .shape import CorpusShape

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
    """Draw pairs of documents: the first names its subject, the second says only "she" or "he".

    Only what the second one says is asked, and only the document before it says about whom that is.
    """
    drawn = draw_adjacent(rng, shape, held_out)
    documents = [
        part
        for document in drawn.documents
        for part in (
            DemoDocument(document.document_id, document.chunks[:1]),
            DemoDocument(f"{document.document_id}-continued", document.chunks[1:]),
        )
    ]
    questions = [
        replace(question, document=2 * question.document + 1, chunk=question.chunk - 1)
        for question in drawn.questions
        if question.kind == "referring"
    ]
    return Draw(documents, _all_places(documents), questions, [])


def draw_revised(rng: random.Random, shape: CorpusShape, held_out: bool) -> Draw:
    """Draw documents of which one or two revise facts of others; what is revised is asked.

    A revision says so in its first chunk and stands after what it revises.
    """
    kinds = draw_kinds(rng, shape)
    revisions = 2 if len(kinds) > 4 else 1
    subjects = draw_subjects(rng, shape, kinds[revisions:], held_out=held_out)
    revised = [replace(subject, revises=True) for subject in rng.sample(subjects, revisions)]
    documents, asked = write_documents(rng, shape, [*subjects, *revised])
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
