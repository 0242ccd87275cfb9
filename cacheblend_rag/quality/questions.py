"""Chooses the questions of an evaluation, from a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

from cacheblend_rag.demo.passages import SINGLE_HOP_FILE
from cacheblend_rag.errors import DatasetError
from cacheblend_rag.quality.cutting import CUT_SETTINGS, Cutting, cut
from cacheblend_rag.quality.dataset import EvalDataset
from cacheblend_rag.quality.forms import load_dataset

SINGLE_HOP = "single-hop"


def choose_questions(
    source: str,
    settings: Sequence[str],
    questions: int,
    passages: int | None,
    seed: int,
    *,
    cutting: Cutting | None = None,
) -> EvalDataset:
    """Return at most so many questions per setting.

    source: ``single-hop`` (which comes with the package), or a file of questions. settings: if
    empty, all of the source's. passages: at most so many per question, gold ones first; None for
    all. seed: for whatever is drawn. cutting: how documents are cut, in the settings of
    `CUT_SETTINGS`; None takes them as they are.
    Raises ConfigError, DatasetError on an unknown setting, and the errors of load_dataset.
    """
    data = load_dataset(SINGLE_HOP_FILE if source == SINGLE_HOP else Path(source))
    if cutting is not None:
        parts = [
            cut(data, setting=setting, cutting=cutting, seed=seed, questions=questions).questions
            for setting in settings or CUT_SETTINGS
        ]
        data = replace(data, questions=tuple(chain(*parts)))
    for setting in settings:
        if setting not in data.settings:
            raise DatasetError(f"{source}: setting {setting!r} must be one of {data.settings}")
    chosen = tuple(
        question.first_passages(passages) if passages else question
        for setting in settings or data.settings
        for question in data.of_setting(setting)[:questions]
    )
    return EvalDataset(data.name, chosen, data.instruction)
