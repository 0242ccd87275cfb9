from __future__ import annotations

import json

from cacheblend_rag.demo.passages import FILE, NOTICE, load_passages, load_real_texts
from cacheblend_rag.quality.scores import holds_answer


def test_every_answer_stands_in_its_passage():
    sample = load_passages()
    texts = {passage.title: passage.text for passage in sample.passages}
    assert len(texts) == len(sample.passages) <= 20
    assert 0 < len(sample.questions) <= 20
    for asked in sample.questions:
        assert all(holds_answer(texts[asked.title], [answer]) for answer in asked.answers)
        assert not any(holds_answer(asked.question, [answer]) for answer in asked.answers)


def test_the_sample_says_whose_it_is():
    plain = json.loads(FILE.read_text(encoding="utf-8"))
    assert 0 < len(plain["musique"]) <= 20
    notice = NOTICE.read_text(encoding="utf-8")
    for words in ("MuSiQue", "Trivedi", "Attribution 4.0", "creativecommons.org/licenses/by/4.0"):
        assert words in notice
    assert f"{len(plain['passages'])} paragraphs of {len(plain['musique'])} questions" in notice
    assert "NOTICE" in plain["notice"]


def test_real_texts_are_many_and_each_is_there_once():
    texts, sample = load_real_texts(), load_passages()
    assert len({text.casefold() for text in texts.passages}) == len(texts.passages)
    assert {one.text for one in sample.passages} <= {*texts.passages}
    assert sum(len(text.split()) for text in texts.passages) > 7500
    assert len(set(texts.questions)) == len(texts.questions) > 40
    assert all(question.endswith("?") for question in texts.questions)
