"""Prompts of one question each, and a collection for retrieval."""

from __future__ import annotations

import random
from collections.abc import Sequence

from .documents import draw_subjects, write_documents
from .prompt import DemoDocument, DemoPrompt, DemoQuestion
from .settings import DRAWS, SETTINGS
from .shape import EVALUATION_SHAPE, CorpusShape
from .subjects import KINDS


def generate_prompts(
    setting: str,
    count: int,
    seed: int,
    *,
    held_out: bool = True,
    shape: CorpusShape = EVALUATION_SHAPE,
    referring_share: float = 0.75,
) -> list[DemoPrompt]:
    """Draw prompts of one question each.

    Args:
        setting: one of `SETTINGS`: `adjacent` (whole documents in order), `fragments` (only the
            chunks that refer back, and only questions about them), `shuffled` (all chunks in
            random order), `linked` (the document before says who is meant), `revised` (a
            document revises an earlier one's facts), `unanswerable` (what is asked was not
            retrieved) or `turns` (an earlier question says who is meant).
        count: how many prompts.
        seed: equal seeds give equal prompts.
        held_out: name only subjects that training never draws, or only ones it may draw.
        shape: size and difficulty of each prompt.
        referring_share: chance that a question is a referring one, where both kinds are possible.
    """
    if setting not in SETTINGS:
        raise ValueError(f"unknown setting {setting!r}; choose one of {', '.join(SETTINGS)}")
    rng = random.Random(f"prompts/{setting}/{seed}")
    return [_draw_prompt(rng, setting, shape, held_out, referring_share) for _ in range(count)]


def generate_collection(
    documents: int, questions: int, seed: int
) -> tuple[list[DemoDocument], list[DemoQuestion]]:
    """Draw one collection for retrieval, about subjects that differ in first and last name.

    A third each is about women, men and companies; a third's documents share their kinds of fact.
    Questions name their subject in full, and `question.document` indexes the collection.
    """
    rng = random.Random(f"collection/{documents}/{questions}/{seed}")
    kinds = [KINDS[index % len(KINDS)] for index in range(documents)]
    shape = CorpusShape(
        documents=(documents, documents),
        total_chunks=(2 * documents, 3 * documents),
        context_tokens=(240 * documents, 250 * documents),
    )
    subjects = draw_subjects(rng, shape, kinds, held_out=True)
    drawn, asked = write_documents(rng, shape, subjects)
    if questions > len(asked):
        raise ValueError(f"{documents} documents answer only {len(asked)} questions")
    return drawn, [each.question for each in rng.sample(asked, questions)]


def _draw_prompt(
    rng: random.Random, setting: str, shape: CorpusShape, held_out: bool, referring_share: float
) -> DemoPrompt:
    drawn = DRAWS[setting](rng, shape, held_out)
    question = _choose(rng, drawn.questions, referring_share)
    if setting == "shuffled":
        rng.shuffle(drawn.retrieved)
    return DemoPrompt(tuple(drawn.documents), tuple(drawn.retrieved), question, setting)


def _choose(
    rng: random.Random, questions: Sequence[DemoQuestion], referring_share: float
) -> DemoQuestion:
    wanted = {question.kind for question in questions}
    if len(wanted) > 1:
        wanted.discard("direct" if rng.random() < referring_share else "referring")
    return next(question for question in questions if question.kind in wanted)
