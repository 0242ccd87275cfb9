"""Documents are cut as each setting says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cacheblend_rag.quality.questions import load_dataset
from cacheblend_rag.quality.scores import holds_answer
from tests.benchmarks import cutting
from tests.toy import TOY


def test_documents_are_cut_in_three_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = [" ".join(f"The {n} stood {place} days." for place in range(20)) for n in range(6)]
    golds = [f"{text} It is gold{n}." for n, text in enumerate(told)]
    asked = [
        {
            "question": f"Which {n}?",
            "answer": f"gold{n}",
            "paragraphs": [
                {"paragraph_text": golds[n], "is_supporting": True},
                {"paragraph_text": told[n + 1]},
            ],
        }
        for n in range(3)
    ]
    (tmp_path / "source.json").write_text(json.dumps(asked))
    source, out = str(tmp_path / "source.json"), str(tmp_path / "cut.json")
    cutting.main(source=source, out=out, model=TOY, chunk_tokens=40, prompt_tokens=500)
    assert json.loads(capsys.readouterr().out) == {"adjacent": 3, "fragments": 3, "shuffled": 3}
    data = load_dataset(tmp_path / "cut.json")
    for one, part, mixed in zip(*map(data.of_setting, data.settings), strict=True):
        chunks = [chunk for document in one.documents for chunk in document.to_chunks()]
        assert list(one.passages) == chunks != list(mixed.passages)
        assert {*mixed.passages} == {*chunks}
        assert one.documents == part.documents == mixed.documents
        assert [chunk for chunk in chunks if chunk in part.passages] == list(part.passages)
        assert all(chunk.context for chunk in part.passages)
        assert any(holds_answer(chunk.text, part.answers) for chunk in part.passages)
        assert all(chunk.text.endswith(".") for chunk in chunks)
