"""Three tasks have the same passages, and other questions."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from cacheblend_rag.errors import DatasetError
from cacheblend_rag.quality.data import load_dataset
from cacheblend_rag.quality.dataset import EvalDataset
from tests.benchmarks.three_tasks import TASKS, main, three_tasks
from tests.toy import TOY

ITEMS = [
    {
        "question": f"Who is {name}?",
        "answers": [name],
        "ctxs": [{"text": f"{name} is one. Of all."}],
    }
    for name in ("Ada", "Bo", "Cy")
]


@pytest.fixture
def data(tmp_path: Path) -> EvalDataset:
    path = tmp_path / "questions.json"
    path.write_text(json.dumps(ITEMS))
    return load_dataset(path)


def test_three_tasks_over_the_same_passages(data: EvalDataset) -> None:
    found = three_tasks(data)
    assert list(found) == list(TASKS)
    for questions in zip(*(one.questions for one in found.values()), strict=True):
        assert len({one.passages for one in questions}) == 1
        assert len({one.question for one in questions}) == 3
    assert [one.answers for one in found["label"].questions] == [("yes",), ("no",), ("yes",)]
    assert "Who is Ada?" in found["label"].questions[0].question
    assert "Who is Cy?" in found["label"].questions[1].question
    assert found["summary"].questions[0].answers == ("Ada is one.",)


def test_labels_take_two_questions(data: EvalDataset) -> None:
    with pytest.raises(DatasetError, match="at least two questions"):
        three_tasks(replace(data, questions=data.questions[:1]))


def test_files_are_written_in_the_form_of_eval(tmp_path: Path) -> None:
    (tmp_path / "questions.json").write_text(json.dumps(ITEMS))
    sizes = ["--chunk-tokens", "4", "--prompt-tokens", "4", "40"]
    out = tmp_path / "made" / "tasks"
    main(["--data", f"{tmp_path}/questions.json", "--out", f"{out}", *sizes, "--model", TOY])
    for name in TASKS:
        assert len(load_dataset(out / f"{name}.json").questions) == len(ITEMS)
