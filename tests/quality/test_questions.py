from __future__ import annotations

import pytest

from cacheblend_rag.errors import DatasetError
from cacheblend_rag.quality.questions import choose_questions
from tests.toy.questions import toy_dataset


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
