"""The embedded engine keeps the contract of all engines; what it alone promises."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from cacheblend_rag import (
    Chunk,
    Document,
    GuardConfig,
    LeadInConfig,
    PromptError,
    TransformersEngine,
    open_engine,
)
from tests.contracts.engine import (
    ALL,
    CONFIG,
    LIKELY,
    REUSE,
    SHORT,
    EmbeddedContract,
    Texts,
    counting,
    distance,
    embedded_model,
    tokenizer_with_template,
    wait_until,
)
from tests.models import make_tokenizer


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return embedded_model()


@pytest.fixture(scope="module")
def calls(model: PreTrainedModel) -> Iterator[list[int]]:
    with counting(model) as calls:
        yield calls


@pytest.fixture
def texts(request: pytest.FixtureRequest) -> Texts:
    return Texts(request.node.name)


@pytest.fixture(scope="module")
def shared(model: PreTrainedModel, calls: list[int]) -> Iterator[TransformersEngine]:
    engine = TransformersEngine(model, tokenizer=tokenizer_with_template(), config=CONFIG)
    yield engine
    engine.close()


class TestTransformersEngine(EmbeddedContract):
    @pytest.fixture
    def engine(self, shared: TransformersEngine) -> TransformersEngine:
        return shared


@pytest.fixture(scope="module")
def engine(model: PreTrainedModel) -> Iterator[TransformersEngine]:
    """An engine whose settings are given when it is opened."""
    engine = TransformersEngine(
        model, tokenizer=make_tokenizer(), config=CONFIG, fill_on_miss=True,
        guard=GuardConfig(sample_share=1.0),
    )  # fmt: skip
    yield engine
    engine.close()


def test_it_fills_and_is_guarded_as_it_was_opened(engine: TransformersEngine, texts: Texts) -> None:
    chunks = texts.chunks(60, 50)
    engine.register(chunks)
    engine.generate(texts.asking(*chunks), SHORT)
    wait_until(lambda: engine.fill_report().waiting == 0)
    assert engine.generate(texts.asking(*chunks), SHORT).report.blended
    wait_until(lambda: engine.guard_report().waiting == 0)
    assert engine.guard_report().compared == 1


def test_messages_need_a_template(engine: TransformersEngine, texts: Texts) -> None:
    assert not engine.has_chat_template
    with pytest.raises(PromptError, match="template"):
        engine.generate([{"role": "user", "content": texts.text(9)}], SHORT)


def test_what_is_on_disk_is_found_by_the_next_engine_of_its_namespace(
    texts: Texts, tmp_path: Path, model: PreTrainedModel
) -> None:
    document = texts.document(60, 50)

    def opened(namespace: str) -> TransformersEngine:
        engine = open_engine(
            "transformers", model=model, tokenizer=make_tokenizer(), config=CONFIG,
            kv_path=tmp_path, host_bytes=0, namespace=namespace,
        )  # fmt: skip
        assert isinstance(engine, TransformersEngine)
        return engine

    first = opened("one")
    assert first.precompute([document], progress=False).computed == 2
    assert first.release() == 0
    first.close()
    prompt = texts.asking(*document.to_chunks()).text
    for namespace, told in (("one", [True, True]), ("two", [])):
        engine = opened(namespace)
        report = engine.generate(prompt, SHORT).report
        assert [chunk.hit for chunk in report.chunks] == told
        assert {chunk.tier for chunk in report.chunks} == ({"disk"} if told else set())
        engine.close()


def test_hints_that_do_not_stand_in_the_prompt_are_told(
    engine: TransformersEngine, texts: Texts
) -> None:
    stored, altered = texts.chunks(40, 50)
    engine.precompute([stored, altered], progress=False)
    prompt = f"{stored.text} {altered.text[:-4]} {texts.text(9)}"
    stranger = Chunk("never registered", "somewhere")
    hints = [stored, altered, stranger, "no such document"]
    report = engine.generate(prompt, SHORT, hints=hints).report
    told = [(c.hit, c.reason, c.start, c.document_id) for c in report.chunks]
    assert told == [
        (True, None, 0, None),
        (True, None, 40, None),  # what is left of it
        (False, "altered text", -1, None),
        (False, "unknown", -1, "somewhere"),
    ]


def test_hints_tell_which_document_a_text_is_of(engine: TransformersEngine, texts: Texts) -> None:
    shared = texts.text(40)
    documents = [
        Document(f"{name} {texts.text(2)}", (texts.text(45), shared), separator=" w77 ")
        for name in "ab"
    ]
    prompt = f"{texts.text(5)} {shared} {texts.text(9)}"

    def used(*hints: Chunk | str) -> tuple[str | None, float]:
        answer = engine.generate(prompt, LIKELY, config=REUSE, hints=hints)
        [chunk] = answer.report.chunks
        assert chunk.hit
        return chunk.document_id, distance(answer, own)

    engine.precompute(documents[:1], progress=False)
    own = engine.generate(prompt, LIKELY, config=REUSE)
    engine.precompute(documents[1:], progress=False)
    first, second = documents
    for hint in (first.document_id, first.to_chunks()[1]):
        assert used(hint) == (first.document_id, pytest.approx(0, abs=1e-4))
    for hints in ((), (second.document_id,), (first.document_id, second.document_id)):
        assert used(*hints)[1] > 1e-3


def test_a_context_that_must_be_confirmed_is_used_only_if_it_is(
    model: PreTrainedModel, texts: Texts
) -> None:
    led = LeadInConfig(unconfirmed_context=False)
    upload = Document(texts.text(2), (texts.text(42), texts.text(40)))
    first, second = upload.to_chunks()
    plain = f"{texts.text(5)} {second.text} {texts.text(9)}"
    whole = f"{texts.text(5)} {first.text} {second.text} {texts.text(9)}"
    answers = []
    for lead_in in (None, led):
        engine = TransformersEngine(
            model, tokenizer=make_tokenizer(), config=CONFIG, lead_in=lead_in
        )
        engine.precompute([upload], progress=False)
        asked = {"config": REUSE}
        found = [
            engine.generate(plain, LIKELY, **asked),
            engine.generate(plain, LIKELY, hints=[upload.document_id], **asked),
            engine.generate(whole, LIKELY, **asked),
        ]
        assert all(answer.report.chunks[-1].hit for answer in found)
        answers.append(found)
        engine.close()
    trusting, careful = answers
    assert distance(trusting[0], careful[0]) > 1e-3, "nothing confirms it"
    assert distance(trusting[1], careful[1]) < 1e-4, "a hint does"
    assert distance(trusting[2], careful[2]) < 1e-4, "the prompt does"


def test_hints_count_for_full_prefill_too(engine: TransformersEngine, texts: Texts) -> None:
    """They may decide at which of two overlapping chunks a prompt is cut."""
    text = texts.text(120).split()
    whole, inner = " ".join(text[:80]), Chunk(" ".join(text[40:]))
    engine.precompute([whole, inner], progress=False)
    prompt = f"{' '.join(text)} {texts.text(9)}"
    for hints, start in (((), 0), ([inner], 40)):
        chunks = engine.generate(prompt, SHORT, config=ALL, hints=hints).report.chunks
        [chunk] = [one for one in chunks if one.tokens == 80]  # beside what is left of the other
        assert chunk.start == start
        full = engine.generate_full(prompt, SHORT, hints=hints)
        assert full.token_ids == engine.generate(prompt, SHORT, config=ALL).token_ids
