"""Chooses the questions of an evaluation, from a file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from cacheblend_rag.demo.passages import SINGLE_HOP_FILE
from cacheblend_rag.errors import DatasetError
from cacheblend_rag.quality.data import load_dataset
from cacheblend_rag.quality.data.cutting import DEFAULT_CUTTING, Cutting, cut
from cacheblend_rag.quality.data.retrieval import CUT_SETTINGS, retrieval
from cacheblend_rag.quality.data.sentences import CountTokens, estimate_tokens
from cacheblend_rag.quality.dataset import EvalDataset

SINGLE_HOP = "single-hop"


@dataclass(frozen=True)
class DataChoice:
    """How questions are made of a source; the defaults take them as they are.

    Args:
        chunk_tokens: about how many tokens a chunk has; cuts a file's documents, in the settings of
            `CUT_SETTINGS`. None with ``prompt_tokens`` is a hundred.
        prompt_tokens: the least and the most tokens of a question's documents. None takes a
            file's documents.
        count_tokens: tells how many tokens a text has.
    """

    chunk_tokens: int | None = None
    prompt_tokens: tuple[int, int] | None = None
    count_tokens: CountTokens = estimate_tokens

    @property
    def cutting(self) -> Cutting | None:
        """How documents are cut; None if they are not. Raises ConfigError."""
        if self.chunk_tokens is None and self.prompt_tokens is None:
            return None
        chunk_tokens = (
            DEFAULT_CUTTING.chunk_tokens if self.chunk_tokens is None else self.chunk_tokens
        )
        return Cutting(chunk_tokens, self.prompt_tokens, self.count_tokens)


AS_IT_IS = DataChoice()


def choose_questions(
    source: str,
    settings: Sequence[str],
    questions: int,
    passages: int | None,
    seed: int,
    *,
    choice: DataChoice = AS_IT_IS,
) -> EvalDataset:
    """Return at most so many questions per setting.

    source: ``single-hop`` (which comes with the package), or a file of questions. settings: if
    empty, all of the source's. passages: at most so many per question, gold ones first; None for
    all. seed: for whatever is drawn. choice: how documents are cut, and how long prompts are.
    Raises ConfigError, DatasetError on an unknown setting, and the errors of load_dataset.
    """
    data = _drawn(source, settings, questions, seed, choice)
    for setting in settings:
        if setting not in data.settings:
            raise DatasetError(f"{source}: setting {setting!r} must be one of {data.settings}")
    chosen = tuple(
        question.first_passages(passages) if passages else question
        for setting in settings or data.settings
        for question in data.of_setting(setting)[:questions]
    )
    return EvalDataset(data.name, chosen, data.instruction)


def _drawn(
    source: str,
    settings: Sequence[str],
    questions: int,
    seed: int,
    choice: DataChoice,
) -> EvalDataset:
    """Return at least the questions that are chosen, as far as the source has them."""
    cutting = choice.cutting
    if cutting:
        for setting in settings:
            retrieval(setting)
    data = load_dataset(SINGLE_HOP_FILE if source == SINGLE_HOP else Path(source))
    if cutting is None:
        return data
    cut_by_setting = (
        cut(data, setting=setting, cutting=cutting, seed=seed, questions=questions)
        for setting in settings or CUT_SETTINGS
    )
    return _joined(cut_by_setting)


def _joined(parts: Iterable[EvalDataset]) -> EvalDataset:
    """Return the questions of data sets that differ in settings only."""
    first, *others = parts
    questions = chain(first.questions, *(part.questions for part in others))
    return replace(first, questions=tuple(questions))
