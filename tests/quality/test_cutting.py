from __future__ import annotations

from dataclasses import replace

import pytest

from cacheblend_rag.errors import ConfigError, DatasetError
from cacheblend_rag.quality.cutting import (
    CUT_SETTINGS,
    QuestionSettings,
    cut,
    cut_text,
)
from cacheblend_rag.quality.dataset import EvalDataset
from cacheblend_rag.quality.questions import over_passages
from cacheblend_rag.text.chunk import Document


def words(text: str) -> int:
    return len(text.split())


def sentence(*names) -> str:
    return " ".join(["The", *map(str, names), "stood", "there", "all", "day."])


def document(number: int, sentences: int, told: str = "", at: int = 0) -> Document:
    texts = [sentence(f"thing{number}", place) for place in range(sentences)]
    if told:
        texts[at] = sentence(f"thing{number}", told)
    return Document(f"d{number}", (" ".join(texts),))


def dataset(sentences: int = 12, at: int = 9, count: int = 6) -> EvalDataset:
    """Questions over two documents each; the second one holds the answer, in sentence ``at``."""
    questions = []
    for i in range(count):
        documents = [document(10 * i, sentences), document(10 * i + 1, sentences, f"gold{i}", at)]
        questions.append(over_passages(f"Which {i}?", (f"gold{i}",), documents, gold=[1]))
    return EvalDataset("made", tuple(questions))


CUTTING = QuestionSettings(chunk_tokens=28)
LONGER = CUTTING.with_changes(prompt_tokens=(300, 400))


def cut_by_words(data, setting, how=CUTTING, questions=None):
    return cut(data, setting, how, questions, words)


@pytest.mark.parametrize("cutting", [CUTTING, LONGER])
def test_adjacent_holds_all_chunks_in_order(cutting):
    for question in cut_by_words(dataset(), "adjacent", cutting).questions:
        assert list(question.passages) == [c for d in question.documents for c in d.to_chunks()]
        assert all(len(d.chunks) >= 2 for d in question.documents)
        assert question.setting == "adjacent"


@pytest.mark.parametrize("cutting", [CUTTING, LONGER])
@pytest.mark.parametrize("sentences", [4, 12])
def test_fragments_never_hold_a_first_chunk_and_keep_the_gold_one(cutting, sentences):
    data = dataset(sentences, at=sentences - 1)
    cutting = cutting.with_changes(chunk_tokens=sentences * 7 // 3)
    found = cut_by_words(data, "fragments", cutting).questions
    assert len(found) == len(data.questions)
    for question in found:
        assert all(passage.context for passage in question.passages)
        assert any(question.answers[0] in passage.text for passage in question.passages)
        names = [passage.document_id for passage in question.passages]
        assert set(names) == {d.document_id for d in question.documents}
        assert sum(len(d.chunks) for d in question.documents) > len(question.passages)
        order = [c for d in question.documents for c in d.to_chunks() if c in question.passages]
        assert order == list(question.passages)


def test_questions_answered_by_a_first_chunk_are_left_out_of_fragments():
    mixed = (*dataset(at=0, count=3).questions, *dataset(at=9).questions[3:])
    data = EvalDataset("made", mixed)
    found = cut_by_words(data, "fragments", CUTTING).questions
    assert [q.question for q in found] == ["Which 3?", "Which 4?", "Which 5?"]
    with pytest.raises(DatasetError, match="no question fits setting='fragments'"):
        cut_by_words(dataset(at=0), "fragments", CUTTING)


def test_shuffled_holds_all_chunks_in_another_order():
    found = cut_by_words(dataset(), "shuffled", CUTTING).questions
    orders = []
    for question in found:
        chunks = [c for d in question.documents for c in d.to_chunks()]
        orders.append([chunks.index(passage) for passage in question.passages])
    assert all(sorted(order) == list(range(len(order))) for order in orders)
    assert any(sorted(order) != order for order in orders)


@pytest.mark.parametrize("setting", CUT_SETTINGS)
def test_data_are_drawn_again_as_before_and_settings_share_documents(setting):
    first, again, other = (
        cut_by_words(dataset(), one, LONGER) for one in (setting, setting, "adjacent")
    )
    assert first == again
    assert [q.documents for q in first.questions] == [q.documents for q in other.questions]


@pytest.mark.parametrize("sentences", [3, 12, 80])
def test_prompts_have_the_wished_length(sentences):
    data = dataset(sentences, at=1, count=60)
    found = cut_by_words(data, "adjacent", LONGER).questions
    assert len(found) == 60
    lengths = [sum(words(p.text) for p in question.passages) for question in found]
    assert all(300 <= length <= 400 for length in lengths)
    assert len(set(lengths)) > 1 or sentences == 80
    for question in found:
        (gold,) = question.gold
        assert question.answers[0] in gold.text.split()
        others = [p for p in question.passages if p != gold]
        assert not any(question.answers[0] in passage.text.split() for passage in others)


def test_a_warning_tells_how_many_questions_were_left_out(caplog):
    mixed = (*dataset(at=0, count=3).questions, *dataset(at=9).questions[3:])
    cut_by_words(EvalDataset("made", mixed), "fragments", CUTTING, questions=3)
    assert not caplog.records
    cut_by_words(EvalDataset("made", mixed), "fragments", CUTTING)
    (told,) = caplog.messages
    assert told.startswith("made, fragments: 3 of 6 questions can be used")


def test_short_documents_are_lengthened_and_text_without_gold_is_searched_for_the_answer():
    data = dataset(3, at=1)
    unmarked = tuple(replace(question, gold=()) for question in data.questions)
    found = cut_by_words(replace(data, questions=unmarked), "adjacent", CUTTING).questions
    for number, question in enumerate(found):
        assert [len(d.chunks) for d in question.documents] == [2, 2]
        assert [chunk.text for chunk in question.gold] == [question.documents[1].chunks[0]]
        assert f"gold{number}" in question.gold[0].text


def test_what_cannot_be_cut_is_refused():
    with pytest.raises(ConfigError, match=r"prompt_tokens=\(500, 600\) .* 2 chunks of 100"):
        QuestionSettings(prompt_tokens=(500, 600))
    with pytest.raises(ConfigError, match="setting='upright'"):
        cut_by_words(dataset(), "upright")
    with pytest.raises(DatasetError, match="no question fits"):
        cut_by_words(dataset(), "adjacent", CUTTING.with_changes(prompt_tokens=(10_000, 12_000)))


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("One is. Two are! Three?", ["One is.", "Two are!", "Three?"]),
        ("dr. no met j. doe. He left.", ["dr. no met j. doe.", "He left."]),
        ('He said "No." She left.', ['He said "No."', "She left."]),
        ("Title\nOne.\n\nTwo", ["Title\nOne.", "Two"]),
        ("", []),
    ],
)
def test_chunks_of_one_token_are_sentences(text, sentences):
    assert list(cut_text(text, 1, words)) == sentences


@pytest.mark.parametrize("chunk_tokens", [7, 20, 50, 1000])
def test_chunks_end_with_sentences_and_are_about_as_long_as_asked(chunk_tokens):
    text = " ".join(sentence("a", place) for place in range(40))
    chunks = cut_text(text, chunk_tokens, words)
    assert " ".join(chunks) == text
    assert all(chunk.endswith("day.") for chunk in chunks)
    assert all(words(chunk) <= chunk_tokens + 7 for chunk in chunks)
    assert len(chunks) == pytest.approx(280 / min(chunk_tokens, 280), abs=1)
