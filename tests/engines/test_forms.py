"""A chunk's form behind a space is stored and dropped with the chunk, and counted nowhere."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from cacheblend_rag import Chunk, Document
from cacheblend_rag.api.document_models import DocumentIn
from cacheblend_rag.api.document_store import (
    delete_document,
    get_document,
    list_documents,
    store_document,
)
from cacheblend_rag.engines import shutdown
from cacheblend_rag.engines.known_chunks import Item
from cacheblend_rag.engines.tally import Stored
from cacheblend_rag.engines.tokenizer import load_tokenizer
from cacheblend_rag.kv.chunk_kv import KVKey
from cacheblend_rag.prefill.lead_in import ChunkPlan, LeadIn
from cacheblend_rag.reason import Reason, ReasonCode
from cacheblend_rag.text.behind_space import behind_space
from cacheblend_rag.text.encoder import PromptEncoder
from cacheblend_rag.text.registry import ChunkRegistry
from tests.engines.contract import CONFIG
from tests.engines.toy_engine import ToyEngine
from tests.toy import TOY

NAMED = "rene wenzel was born in 1921, and lived by the sea for forty years or more."
SHORT = "rene wenzel was born in 1921."
OTHER = "The lighthouse was built by a widow. She kept the lamp burning."
FORM = f" {NAMED}"


class FindingEngine(ToyEngine):
    """A toy engine whose chunks are found by tokens in others' prompts, too."""

    finds_by_tokens = True

    def __init__(self, **settings: Any) -> None:
        self.given: list[ChunkPlan] = []
        self.refusal: Reason | None = None
        self.refuses_forms_only = False
        super().__init__(load_tokenizer(TOY), config=CONFIG, **settings)

    def _store(self, plans: Sequence[ChunkPlan]) -> Any:
        self.given += plans
        if self.refusal and (plans[0].form_of or not self.refuses_forms_only):
            return (Stored.failure(self.refusal) for _ in plans)
        return super()._store(plans)


@pytest.fixture
def engine() -> Iterator[FindingEngine]:
    engine = FindingEngine()
    yield engine
    engine.close()


def stored(engine: ToyEngine, *chunks: Chunk) -> list[bool]:
    return engine.stored([engine.key(chunk) for chunk in chunks])


def forms_of(engine: ToyEngine, item: Item) -> list[bool]:
    """Whether the forms of a document's named chunks are stored, with their contexts."""
    chunks = item.to_chunks() if isinstance(item, Document) else [Chunk(str(item))]
    named = [chunk for chunk in chunks if chunk.text == NAMED]
    return stored(engine, *(Chunk(FORM, one.document_id, one.context) for one in named))


def test_it_is_stored_with_its_chunk_and_not_counted(engine: FindingEngine) -> None:
    document = Document("d", (OTHER, NAMED))
    report = engine.precompute([document], progress=False)
    assert (report.computed, report.skipped, report.refused) == (2, 0, {})
    assert report.computed_tokens == sum(len(engine.tokenize(text)) for text in (OTHER, NAMED))
    assert forms_of(engine, document) == [True]
    [form] = [plan for plan in engine.given if plan.form_of]
    assert form.token_ids == engine.tokenize(FORM)
    plain = engine.key(document.to_chunks()[1])
    assert (form.form_of, form.key.context_id) == (plain.chunk_id, plain.context_id)
    again = engine.precompute([document], progress=False, verify=True)
    assert (again.computed, again.skipped) == (0, 2)
    assert engine.stored_chunks() == 3, "added twice, stored once"


def test_a_chunk_that_is_too_short_to_be_found_has_none(engine: FindingEngine) -> None:
    encoder = PromptEncoder(load_tokenizer(TOY))
    assert behind_space(SHORT, encoder) is not None
    engine.precompute([SHORT], progress=False)
    assert engine.stored_chunks() == 1


def test_a_form_that_was_lost_is_stored_again(engine: FindingEngine) -> None:
    engine.precompute([NAMED], progress=False)
    engine._evict([engine.key(Chunk(FORM))])
    again = engine.precompute([NAMED], progress=False)
    assert (again.computed, again.skipped, forms_of(engine, NAMED)) == (0, 1, [True])


def test_documents_over_http_have_the_chunks_that_were_given(engine: FindingEngine) -> None:
    told = store_document(engine, "d", DocumentIn(chunks=[OTHER, NAMED]), 0.0)
    assert (told.chunks, told.computed, told.skipped, told.failed) == (2, 2, 0, 0)
    shown = get_document(engine, "d", None).chunks
    assert [(one.text, one.stored) for one in shown] == [(OTHER, True), (NAMED, True)]
    assert [one.chunks for one in list_documents(engine, 9, "", None).data] == [2]
    assert delete_document(engine, "d", None).evicted == 2
    assert engine.stored_chunks() == 0


def test_a_document_without_the_chunk_loses_the_form(engine: FindingEngine) -> None:
    old = Document("d", (NAMED, OTHER))
    engine.precompute([old], progress=False)
    report = engine.precompute([Document("d", (f"{OTHER} More.",))], progress=False)
    assert report.replaced == 2
    assert forms_of(engine, old) == [False]
    assert engine.stored_chunks() == 1


def test_a_form_that_is_also_a_chunk_stays_until_both_are_gone(engine: FindingEngine) -> None:
    engine.precompute([Document("a", (NAMED,)), Document("b", (FORM,))], progress=False)
    assert engine.stored_chunks() == 2
    assert engine.evict_document("a") == 1
    assert forms_of(engine, NAMED) == [True]
    engine.precompute([Document("a", (NAMED,))], progress=False)
    assert engine.evict_document("b") == 0, "its KV is still that of a's form"
    assert forms_of(engine, NAMED) == [True]
    assert engine.evict_document("a") == 1
    assert engine.stored_chunks() == 0


def test_a_form_that_goes_as_a_chunk_is_counted_as_one(engine: FindingEngine) -> None:
    engine.precompute([Chunk(NAMED, "a"), Chunk(FORM, "a")], progress=False)
    assert engine.stored_chunks() == 2
    assert engine.evict_document("a") == 2
    assert engine.stored_chunks() == 0


def test_what_documents_share_stays_until_both_are_gone(engine: FindingEngine) -> None:
    engine.precompute([Document("a", (NAMED,)), Document("b", (NAMED, OTHER))], progress=False)
    assert engine.evict_document("a") == 0
    assert forms_of(engine, NAMED) == [True]
    assert engine.evict_document("b") == 2
    assert engine.stored_chunks() == 0


def test_kv_of_a_form_belongs_to_its_registered_chunk(engine: FindingEngine) -> None:
    engine.precompute([Document("a", (NAMED,)), Document("b", (OTHER,))], progress=False)
    assert engine.evict_unregistered() == 0
    engine.registry.remove_document("a")
    assert engine.evict_unregistered() == 2
    assert engine.stored_chunks() == 1


def test_what_is_filled_has_its_form(engine: FindingEngine) -> None:
    engine.register([NAMED])
    for done in engine._index.fill([Chunk(NAMED)]):
        assert done.chunks <= 1
    assert forms_of(engine, NAMED) == [True]


def test_a_form_is_encoded_as_native_work(
    engine: FindingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a daemon thread: see engines/shutdown.py."""
    working: list[int] = []
    behind_space = LeadIn.behind_space

    def watched(lead_in: LeadIn, chunk: Chunk) -> Chunk | None:
        working.append(shutdown._gate._working)
        return behind_space(lead_in, chunk)

    monkeypatch.setattr(LeadIn, "behind_space", watched)
    engine.register([NAMED])
    for _ in engine._index.fill([Chunk(NAMED)]):
        assert shutdown._gate._working == 0
    assert working == [1]


def test_a_chunk_that_could_not_be_stored_has_no_form(engine: FindingEngine) -> None:
    long = f"{NAMED} {OTHER * 2000}"
    report = engine.precompute([long], progress=False)
    assert [reason.code for reason in report.refused] == [ReasonCode.TOO_LONG]
    assert (engine.given, engine.stored_chunks()) == ([], 0)
    engine.refusal = Reason(ReasonCode.STORE_FULL, "planted")
    assert engine.precompute([NAMED], progress=False).refused == {engine.refusal: 1}
    assert [plan.form_of for plan in engine.given] == [""]


def test_a_form_that_is_refused_is_logged_and_not_counted(
    engine: FindingEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.precompute([NAMED], progress=False)
    engine._evict([engine.key(Chunk(FORM))])
    engine.refusal, engine.refuses_forms_only = Reason(ReasonCode.STORE_FULL, "planted"), True
    with caplog.at_level(logging.DEBUG, "cacheblend_rag.engines.index_time"):
        report = engine.precompute([NAMED], progress=False)
    assert (report.skipped, report.refused) == (1, {})
    [record] = caplog.records
    assert record.getMessage().startswith("1 forms of chunks, or bare chunks, are not stored: ")


def test_only_chunks_are_prefetched(engine: FindingEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of the engine itself hold chunks in their own form."""
    asked: list[KVKey] = []
    monkeypatch.setattr(engine, "_prefetch", asked.extend)
    engine.precompute([Document("a", (NAMED,))], progress=False)
    engine.prefetch(["a"])
    assert asked == [engine.key(Chunk(NAMED, "a"))]


def test_a_form_that_another_writer_removed_is_dropped() -> None:
    registry = ChunkRegistry()
    engine = FindingEngine(registry=registry)
    engine.precompute([NAMED], progress=False)
    registry.discard(Chunk(NAMED))
    engine._index.forget_removed([Chunk(NAMED)])
    assert engine.stored_chunks() == 0
    engine.close()


def test_an_engine_that_finds_texts_stores_no_forms() -> None:
    engine = ToyEngine(load_tokenizer(TOY), config=CONFIG)
    engine.precompute([NAMED, Document("a", (FORM,))], progress=False)
    assert engine.stored_chunks() == 2
    assert engine.evict_document("a") == 1
    engine.close()
