"""Questions are read in three forms, and their documents cut in three settings."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from cacheblend_rag.engines.model_files import load_tokenizer
from cacheblend_rag.errors import DatasetError
from cacheblend_rag.quality.dataset import EvalDataset, EvalQuestion, PromptFrame
from cacheblend_rag.quality.questions import (
    choose_questions,
    load_dataset,
)
from cacheblend_rag.rag.prompt import RagPrompt, Turn
from cacheblend_rag.text.chunk import Document
from tests.toy import TOY
from tests.toy.questions import toy_dataset

PASSAGES = [
    {
        "question": "Who wrote it?",
        "answers": ["Ada", "Ada Lovelace"],
        "ctxs": [{"title": "Notes", "text": "Ada wrote it."}, {"title": "", "text": "An engine."}],
    },
    {"question": "When?", "answers": ["1843"], "ctxs": [{"text": "In 1843."}]},
]
MUSIQUE = [
    {
        "id": "2hop",
        "question": "Where was the founder of Acme born?",
        "answer": "Bath",
        "answer_aliases": ["Bath, England", "Bath"],
        "answerable": True,
        "paragraphs": [
            {"idx": 0, "title": "Acme", "paragraph_text": "Ada founded it.", "is_supporting": True},
            {"idx": 1, "title": "Cy", "paragraph_text": "Cy paints.", "is_supporting": False},
            {"idx": 2, "title": "Ada", "paragraph_text": "Born in Bath.", "is_supporting": True},
        ],
    },
    {
        "id": "none",
        "question": "Where was the founder of Zenith born?",
        "answer": "Ulm",
        "answer_aliases": [],
        "answerable": False,
        "paragraphs": [{"title": "Cy", "paragraph_text": "Cy paints.", "is_supporting": False}],
    },
]
FIRST, SECOND = Document("a", ("One.", "Two.", "Three.")), Document("b", ("Four.",), " ")


def question(setting: str = "adjacent") -> EvalQuestion:
    a, b = FIRST.to_chunks(), SECOND.to_chunks()
    return EvalQuestion("Which?", ("two",), (a[1], b[0], a[2]), (FIRST, SECOND), setting)


@pytest.fixture
def write(tmp_path):
    def write_json(plain):
        path = tmp_path / "questions.json"
        text = plain if isinstance(plain, str) else json.dumps(plain)
        path.write_text(text, encoding="utf-8")
        return path

    return write_json


def test_passages_become_documents_of_their_own(write):
    data = load_dataset(write(PASSAGES))
    first, second = data.questions
    assert (data.name, data.settings) == ("questions", ("retrieved",))
    assert first.answers == ("Ada", "Ada Lovelace")
    assert [p.text for p in first.passages] == ["Notes\nAda wrote it.", "An engine."]
    assert [p.context for p in first.passages] == [(), ()]
    assert [d.to_chunks()[0] for d in first.documents] == list(first.passages)
    ids = [d.document_id for q in (first, second) for d in q.documents]
    assert len(set(ids)) == 3


def test_saved_dataset_comes_back_equal(tmp_path, write):
    (loaded,) = load_dataset(write(own())).questions
    assert (loaded.setting, loaded.documents) == ("retrieved", (Document("a", ("One.",), "\n\n"),))
    marked = replace(question("adjacent"), gold=(FIRST.to_chunks()[2],), question_first=True)
    data = EvalDataset("mine", (marked, question("shuffled")), "Do it, Zoë.")
    data.save(tmp_path / "mine.json")
    assert load_dataset(tmp_path / "mine.json") == data
    assert data.of_setting("shuffled") == (question("shuffled"),)


def own(**changes):
    item = {
        "question": "Which?",
        "answers": ["one"],
        "documents": [{"id": "a", "chunks": ["One."]}],
        "passages": [[0, 0]],
    }
    return {"format": "cacheblend-rag/eval", "version": 1, "questions": [{**item, **changes}]}


@pytest.mark.parametrize(
    ("plain", "message"),
    [
        ([], "the form is not recognised; it must be one of: a list of questions"),
        ([{**PASSAGES[0], "answers": []}], r"\[0\]: answers: List should have at least 1 item"),
        ([{**PASSAGES[0], "answers": [1843]}], r"answers\[0\]: Input should be a valid string"),
        ([{**PASSAGES[0], "ctxs": [{"title": "T"}]}], r"ctxs\[0\]: text: Field required"),
        ({"format": "other", "version": 1}, "format: Input should be 'cacheblend-rag/eval'"),
        (own(passages=[[1, 0]]), r"questions\[0\]: .*there is no chunk \[1, 0\]"),
        (own(documents=[{"id": "a", "chunks": ["One."]}] * 2), "must have different ids"),
        (own(gold=[[0, 1]]), r"there is no chunk \[0, 1\]"),
    ],
)
def test_errors_name_file_and_field_in_one_line(write, plain, message):
    path = write(plain)
    with pytest.raises(DatasetError, match=message) as caught:
        load_dataset(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_missing_and_damaged_files_are_dataset_errors(tmp_path):
    with pytest.raises(DatasetError, match="cannot be read"):
        load_dataset(tmp_path / "none.json")
    (tmp_path / "cut.json").write_text('[{"question": ')
    with pytest.raises(DatasetError, match="cannot be read as JSON"):
        load_dataset(tmp_path / "cut.json")
    (tmp_path / "cut.json").write_text(f"{lines(MUSIQUE)}\n{{'question'}}\n")
    with pytest.raises(DatasetError, match=r"cannot be read as JSON .*line 4"):
        load_dataset(tmp_path / "cut.json")


def lines(items):
    return "".join(f"{json.dumps(item)}\n" for item in items)


@pytest.mark.parametrize("text", [lines(MUSIQUE), json.dumps(MUSIQUE)])
def test_musique_is_read_as_lines_or_as_a_list(write, text):
    (question,) = load_dataset(write(text)).questions
    assert question.answers == ("Bath", "Bath, England")
    assert [chunk.text for chunk in question.gold] == [
        "Acme\nAda founded it.",
        "Ada\nBorn in Bath.",
    ]
    assert len(question.passages) == 3


def test_musique_of_one_line_and_without_answers(write):
    assert len(load_dataset(write(lines(MUSIQUE[:1]))).questions) == 1
    with pytest.raises(DatasetError, match="no answerable question"):
        load_dataset(write(lines(MUSIQUE[1:])))


# Choosing


def test_single_hop_questions_come_with_the_package():
    data = choose_questions("single-hop", 99)
    assert len({question.question for question in data.questions}) == len(data.questions) > 10
    for question in data.questions:
        holding = [p for p in question.passages if question.answers[0] in p.text.lower()]
        assert holding == list(question.gold)
        assert len(question.passages) == 4


def test_questions_are_chosen_by_setting_and_number(tmp_path):
    data = toy_dataset([], 3, 1)
    data.save(path := tmp_path / "demo.json")
    chosen = choose_questions(str(path), 2, ("shuffled", "adjacent"))
    wanted = (*data.of_setting("shuffled")[:2], *data.of_setting("adjacent")[:2])
    assert chosen.questions == wanted
    assert choose_questions(str(path), 3) == data


def test_a_setting_that_the_questions_do_not_have_is_refused():
    with pytest.raises(DatasetError, match=r"'upright' must be one of .*retrieved"):
        choose_questions("single-hop", 2, ("upright",))


# Prompts


class Templated:
    """A tokenizer with a chat template like SmolLM2's."""

    chat_template = "yes"

    def apply_chat_template(self, messages, *, tokenize, add_generation_prompt):
        told = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
        return f"{told}<|im_start|>assistant\n"


@pytest.mark.parametrize("tokenizer", [Templated(), SimpleNamespace(), load_tokenizer(TOY)])
def test_prompts_are_those_of_ask(tokenizer):
    frame, ask = PromptFrame.of(tokenizer, "Be brief."), RagPrompt(tokenizer, "Be brief.")
    asked = question()
    texts = tuple(passage.text for passage in asked.passages)
    prompt = frame.prompt(asked)
    assert prompt.text == ask.render([Turn.of("Which?", texts)])
    assert frame.prompt(asked, bare=True).text == ask.render([Turn("Which?")])
    rendered = bool(getattr(tokenizer, "chat_template", None))
    assert (frame.opening, prompt.is_rendered) == (ask.lead_in, rendered)
    assert [s.chunk for s in prompt.segments if s.chunk] == list(asked.passages)
    before = frame.prompt(replace(asked, question_first=True)).text
    assert sorted(before.split()) == sorted(prompt.text.split())
    assert before.index("Which?") < before.index(texts[0]) < before.index("Answer:")
