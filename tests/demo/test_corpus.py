"""The controlled-English corpus: what its draws promise."""

from __future__ import annotations

import random
import re

import pytest

from cacheblend_rag.demo import corpus
from tests.toy import (
    FIRST_NAMES,
    SETTINGS,
    UNKNOWN,
    CorpusShape,
    DemoDocument,
    DemoPrompt,
    draw_documents,
    generate_collection,
    generate_prompts,
    held_out_names,
)
from tests.toy.subjects import KINDS

PRONOUNS = ({"she", "her"}, {"he", "his"}, {"company"})
FULL_NAME = re.compile(rf"\b(?:{'|'.join(sorted(FIRST_NAMES))}) [A-Z]\w+")


def _names(prompt: DemoPrompt) -> list[str]:
    return [_subject(document.chunks[0]) for document in prompt.documents]


def _subject(naming_chunk: str) -> str:
    """The name at the end of the introduction."""
    first_sentence = naming_chunk.split(".", maxsplit=1)[0]
    return " ".join(first_sentence.split()[-2:])


@pytest.mark.parametrize("setting", SETTINGS)
def test_equal_seeds_give_equal_prompts(setting: str) -> None:
    assert generate_prompts(setting, 5, 3) == generate_prompts(setting, 5, 3)
    assert generate_prompts(setting, 5, 3) != generate_prompts(setting, 5, 4)


def test_unknown_setting_is_named() -> None:
    with pytest.raises(ValueError, match="sideways"):
        generate_prompts("sideways", 1, 0)


def test_training_draws_never_hold_a_held_out_name() -> None:
    kept_out = held_out_names()
    shape = CorpusShape(mixed=0.3)
    rng = random.Random(0)
    for _ in range(150):
        documents, _questions = draw_documents(rng, shape)
        assert not kept_out.intersection(_subject(document.chunks[0]) for document in documents)


@pytest.mark.parametrize("setting", SETTINGS)
def test_evaluation_draws_hold_only_held_out_names(setting: str) -> None:
    kept_out = held_out_names()
    for prompt in generate_prompts(setting, 50, 1):
        text = " ".join([document.text for document in prompt.documents])
        named = set(FULL_NAME.findall(text))
        assert named <= kept_out
        assert set(FULL_NAME.findall(prompt.question.conversation)) <= named


@pytest.mark.parametrize("setting", [setting for setting in SETTINGS if setting != "linked"])
def test_later_chunks_never_name_a_subject(setting: str) -> None:
    for prompt in generate_prompts(setting, 50, 2):
        parts = {part for name in _names(prompt) for part in name.split()}
        for document in prompt.documents:
            assert all(not parts & set(_words(chunk)) for chunk in document.chunks[1:])


def test_documents_share_type_pronoun_and_facts_and_differ_in_names() -> None:
    for prompt in generate_prompts("adjacent", 60, 3):
        assert len(prompt.documents) >= 4
        firsts, lasts = zip(*(name.split() for name in _names(prompt)), strict=True)
        assert len(set(firsts)) == len(firsts)
        assert len(set(lasts)) == len(lasts)
        groups = [
            {index for index, words in enumerate(PRONOUNS) if words & _later_words(document.chunks)}
            for document in prompt.documents
        ]
        assert all(group == groups[0] and len(group) == 1 for group in groups)


def test_every_document_answers_each_kind_of_question_differently() -> None:
    rng = random.Random(4)
    for _ in range(60):
        documents, questions = draw_documents(rng, corpus.EVALUATION_SHAPE, held_out=True)
        answers = [
            sorted(q.kind for q in questions if q.document == index)
            for index in range(len(documents))
        ]
        assert all(kinds == answers[0] for kinds in answers)
        assert len({q.answer for q in questions}) == len(questions)
        for question in questions:
            chunk = documents[question.document].chunks[question.chunk]
            assert question.answer in _words(chunk)
            assert (question.kind == "direct") == (question.chunk == 0)


def test_settings_retrieve_what_they_say() -> None:
    for prompt in generate_prompts("adjacent", 20, 5):
        assert list(prompt.retrieved) == sorted(prompt.retrieved)
        assert len(prompt.retrieved) == sum(len(doc.chunks) for doc in prompt.documents)
    for prompt in generate_prompts("fragments", 20, 5):
        assert all(chunk > 0 for _, chunk in prompt.retrieved)
        assert prompt.question.kind == "referring"
    for prompt in generate_prompts("shuffled", 20, 5):
        assert list(prompt.retrieved) != sorted(prompt.retrieved)


def test_linked_documents_are_named_by_the_document_before_only() -> None:
    for prompt in generate_prompts("linked", 40, 8):
        question, count = prompt.question, len(prompt.documents)
        assert list(prompt.retrieved) == sorted(prompt.retrieved)
        assert len(prompt.retrieved) == sum(len(document.chunks) for document in prompt.documents)
        named, others = prompt.documents[::2], prompt.documents[1::2]
        assert all(FULL_NAME.search(_opening(document)) for document in named)
        assert not any(FULL_NAME.search(document.text) for document in others)
        (name,) = FULL_NAME.findall(question.question)
        assert name in prompt.documents[question.document - 1].text
        about = prompt.documents[question.document]
        assert question.answer in _words(about.chunks[question.chunk])
        assert _stated(about, prompt) == [question.answer]
        assert len({_stated(document, prompt)[0] for document in others}) == count // 2 >= 4


def test_the_later_of_two_values_is_the_answer_if_it_says_so() -> None:
    for prompt in generate_prompts("revised", 40, 9):
        (name,) = FULL_NAME.findall(prompt.question.question)
        original, revision = [doc for doc in prompt.documents if name in doc.chunks[0]]
        assert "changes" in _opening(revision)
        assert "changes" not in _opening(original)
        assert _stated(revision, prompt) == [prompt.question.answer]
        (replaced,) = _stated(original, prompt)
        assert replaced != prompt.question.answer
        assert len(prompt.retrieved) == sum(len(doc.chunks) for doc in prompt.documents)


def test_nothing_retrieved_answers_what_is_not_known() -> None:
    whole = 0
    for prompt in generate_prompts("unanswerable", 40, 10):
        question = prompt.question
        assert question.answer == UNKNOWN
        assert len(_stated(prompt.documents[question.document], prompt)) == 1
        kept = [chunk for document, chunk in prompt.retrieved if document == question.document]
        assert all(chunk < question.chunk for chunk in kept)
        read = DemoDocument("", tuple(prompt.documents[question.document].chunks[c] for c in kept))
        assert _stated(read, prompt) == []
        assert any(
            _stated(document, prompt)
            for index, document in enumerate(prompt.documents)
            if index != question.document
        )
        whole += not kept
    assert 10 <= whole <= 35


def test_the_earlier_turn_names_whom_the_question_is_about() -> None:
    for prompt in generate_prompts("turns", 40, 11):
        question = prompt.question
        assert not FULL_NAME.search(question.question)
        assert set(re.findall(r"\w+", question.question)) & set().union(*PRONOUNS)
        ((before, answer),) = question.earlier
        (name,) = FULL_NAME.findall(before)
        about = next(document for document in prompt.documents if name in document.chunks[0])
        assert prompt.documents[question.document] is about
        assert {answer, question.answer} <= _words(about.text)
        assert answer != question.answer
        assert prompt.segments()[-1][1] == (
            f"\n\nQuestion: {before}\nAnswer: {answer}\n\nQuestion: {question.question}\nAnswer:"
        )


def test_most_questions_refer_back() -> None:
    kinds = [prompt.question.kind for prompt in generate_prompts("adjacent", 300, 6)]
    assert 0.67 <= kinds.count("referring") / len(kinds) <= 0.85


def test_segments_join_to_the_prompt() -> None:
    prompt = generate_prompts("adjacent", 1, 7)[0]
    segments = prompt.segments()
    assert [text for kind, text in segments if kind == "chunk"] == list(prompt.chunk_texts)
    assert segments[0] == ("text", corpus.INSTRUCTION + "\n\n")
    assert segments[-1] == ("text", f"\n\nQuestion: {prompt.question.question}\nAnswer:")
    assert all(chunk == chunk.strip() for chunk in prompt.chunk_texts)


def test_collection_is_deterministic_with_subjects_of_their_own() -> None:
    documents, questions = generate_collection(24, 48, 0)
    assert (documents, questions) == generate_collection(24, 48, 0)
    assert len(documents) == 24
    assert len(questions) == 48
    names = [_subject(document.chunks[0]) for document in documents]
    firsts = {name.split()[0] for name in names}
    assert len(firsts) == 24
    assert len({document.document_id for document in documents}) == 24
    for question in questions:
        assert names[question.document] in question.question
        assert question.answer in _words(documents[question.document].chunks[question.chunk])


def test_collection_refuses_more_questions_than_facts() -> None:
    with pytest.raises(ValueError, match="answer only"):
        generate_collection(2, 1000, 0)


def _opening(document: DemoDocument) -> str:
    return document.text.split(".", maxsplit=1)[0]


def _stated(document: DemoDocument, prompt: DemoPrompt) -> list[str]:
    """What a document says of the asked kind of fact, about whomever."""
    question = FULL_NAME.sub("{name}", prompt.question.question)
    attribute = next(
        attribute
        for kind in KINDS
        for attribute in kind.attributes
        if question in attribute.questions
    )
    ends = [statement.split("}", maxsplit=1)[1] for statement in attribute.statements]
    return [
        value
        for value in attribute.values
        if any(end.format(value=value) in document.text for end in ends)
    ]


def _words(text: str) -> set[str]:
    return set(text.replace(".", " ").replace(",", " ").replace("'s", " ").split())


def _later_words(chunks: tuple[str, ...]) -> set[str]:
    return {word.lower() for chunk in chunks[1:] for word in _words(chunk)}
