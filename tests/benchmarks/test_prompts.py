"""Prompts hold what their question needs, in each setting, and are as long as was asked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cacheblend_rag.quality.dataset import EvalDataset
from cacheblend_rag.quality.questions import load_dataset
from cacheblend_rag.quality.scores import holds_answer
from tests.benchmarks import prompts
from tests.toy import TOY

KINDS = ["single-hop", "needle", "tracking", "referring"]


def made(folder: Path, kind: str, **options: Any) -> EvalDataset:
    out = folder / "prompts.json"
    prompts.main(kind, out=str(out), model=TOY, prompt_tokens=3000, **options)
    return load_dataset(out)


def check(data: EvalDataset) -> None:
    for setting in data.settings[1:]:
        for one, other in zip(*map(data.of_setting, ("adjacent", setting)), strict=True):
            chunks = [chunk for document in one.documents for chunk in document.to_chunks()]
            assert list(one.passages) == chunks
            assert (list(other.passages) == chunks) == other.question_first
            assert other.question_first == (setting == "question-first")
            assert one.documents == other.documents
            kept = [chunk for chunk in chunks if chunk in other.passages]
            if setting == "shuffled":
                assert kept == chunks
                assert any(chunk.context for chunk in kept)
            else:
                assert kept == list(other.passages)
            assert {*one.gold} <= {*other.passages}
            assert any(holds_answer(chunk.text, one.answers) for chunk in one.gold)
            assert all(chunk.text.endswith((".", '"', ")", "?")) for chunk in chunks)


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_of_a_kind_hold_their_answers_and_are_the_same_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    data = made(tmp_path, kind, questions=4)
    settings = ("adjacent", "fragments", "question-first", "shuffled")
    settings = settings[: 3 if kind == "referring" else 4]
    assert data.settings == settings
    told = json.loads(capsys.readouterr().out)
    assert [told[one][0] for one in settings] == [4] * len(settings)
    assert abs(told["adjacent"][1] - 3000) < 300
    check(data)
    later = made(tmp_path, kind, questions=2, skip=2)
    for setting in settings:
        assert later.of_setting(setting) == data.of_setting(setting)[2:]
    other = made(tmp_path, kind, questions=2, skip=2, seed=1)
    assert other.of_setting("adjacent") != later.of_setting("adjacent")


def test_only_the_chunks_of_one_chain_are_gold(tmp_path: Path) -> None:
    for one in made(tmp_path, "tracking", questions=2).of_setting("adjacent"):
        assert len(one.gold) <= 2
        name = one.question.removeprefix("What is the secret number of ").removesuffix("?")
        assert f"The secret number of {name} is that of" in " ".join(c.text for c in one.gold)


def test_questions_of_a_file_stand_among_other_questions_documents(tmp_path: Path) -> None:
    told = [" ".join(f"The {n} stood {place} days." for place in range(60)) for n in range(20)]
    asked = [
        {
            "question": f"Which {n}?",
            "answer": f"gold{n}",
            "paragraphs": [
                {"paragraph_text": f"{told[n]} It is gold{n}.", "is_supporting": True},
                {"paragraph_text": told[n + 1]},
            ],
        }
        for n in range(19)
    ]
    (tmp_path / "source.json").write_text(json.dumps(asked))
    data = made(tmp_path, "qa", source=str(tmp_path / "source.json"), chunk_tokens=40)
    check(data)
    for one in data.questions:
        assert sum(holds_answer(chunk.text, one.answers) for chunk in one.passages) == 1
        assert len(one.documents) > 2
