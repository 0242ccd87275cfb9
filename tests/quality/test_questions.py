from __future__ import annotations

import pytest

from cacheblend_rag.errors import ConfigError, DatasetError
from cacheblend_rag.quality.data import load_dataset
from cacheblend_rag.quality.questions import choose_questions
from tests.toy import held_out_names
from tests.toy.questions import toy_dataset


def test_demo_questions_are_about_held_out_subjects_and_round_trip(tmp_path):
    data = toy_dataset(["adjacent", "fragments"], 5, 1)
    assert [len(data.of_setting(s)) for s in data.settings] == [5, 5]
    for question in data.questions:
        assert any(name in question.question for name in held_out_names())
        assert set(question.passages) <= {c for d in question.documents for c in d.to_chunks()}
    assert all(passage.context for q in data.of_setting("fragments") for passage in q.passages)
    data.save(tmp_path / "demo.json")
    assert load_dataset(tmp_path / "demo.json") == data


def test_demo_questions_refuse_an_unknown_setting():
    with pytest.raises(ConfigError, match="setting='upright'"):
        toy_dataset(["upright"], 1, 1)


def test_questions_are_chosen_from_a_file_by_setting_number_and_passages(tmp_path):
    data = toy_dataset([], 3, 1)
    data.save(path := tmp_path / "demo.json")
    chosen = choose_questions(str(path), ["shuffled", "adjacent"], 2, 1, 1)
    wanted = [*data.of_setting("shuffled")[:2], *data.of_setting("adjacent")[:2]]
    assert [q.question for q in chosen.questions] == [q.question for q in wanted]
    assert [q.passages for q in chosen.questions] == [q.passages[:1] for q in wanted]
    assert choose_questions(str(path), [], 3, None, 1) == data
    with pytest.raises(DatasetError, match="'upright'"):
        choose_questions(str(path), ["upright"], 2, None, 1)
