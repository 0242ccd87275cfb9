"""Index time: lead-ins, batches, documents and their windows, edits, priors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from cacheblend_rag import Chunk, ChunkKV, Document, TieredKVStore
from cacheblend_rag.blend.steps import Steps
from cacheblend_rag.kv.chunk_kv import KVKey
from cacheblend_rag.kv.stored_chunk import PutResult
from cacheblend_rag.prefill import precompute
from cacheblend_rag.text.sqlite_registry import SharedChunkRegistry
from tests.engines.transformers.conftest import EngineFactory
from tests.models import words

INSTRUCTION = words(4, 50)
PIECES = tuple(words(12 + i, i) for i in range(4))
DOCUMENT = Document("doc", PIECES, separator=" w77 ")


def ordinary_kv(model: PreTrainedModel, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    cache = DynamicCache()
    model(input_ids=ids[None], past_key_values=cache, use_cache=True)
    return (
        torch.stack([layer.keys[0] for layer in cache.layers]),
        torch.stack([layer.values[0] for layer in cache.layers]),
    )


def tokens(engine, text: str) -> torch.Tensor:
    return torch.tensor(engine.tokenizer(text, add_special_tokens=False)["input_ids"])


def stored(engine, chunk: Chunk):
    found = engine.store.get(engine.key(chunk)).kv
    assert found is not None
    return found


@pytest.mark.parametrize("lead_in", ["none", "bos", "instruction"])
def test_a_chunk_is_computed_behind_its_lead_in(make_engine: EngineFactory, lead_in: str) -> None:
    engine = make_engine(lead_in=lead_in, instruction=INSTRUCTION)
    lead = INSTRUCTION if lead_in == "instruction" else ""
    chunks = [Chunk(words(n, n)) for n in (5, 40, 17)]
    report = engine.precompute(chunks, progress=False)
    assert (report.computed, report.skipped, report.computed_tokens) == (3, 0, 62)
    for chunk in chunks:
        before = tokens(engine, lead).numel()
        with torch.no_grad():
            keys, values = ordinary_kv(engine.model, tokens(engine, f"{lead} {chunk.text}"))
        kv = stored(engine, chunk)
        assert kv.position == before
        torch.testing.assert_close(kv.keys, keys[:, :, before:], atol=1e-5, rtol=0)
        torch.testing.assert_close(kv.values, values[:, :, before:], atol=1e-5, rtol=0)


def test_contextual_kv_is_a_slice_of_the_whole_documents_kv(make_engine: EngineFactory) -> None:
    engine = make_engine(instruction=INSTRUCTION)
    engine.precompute([DOCUMENT], progress=False)
    whole = tokens(engine, f"{INSTRUCTION} {DOCUMENT.separator.join(PIECES)}")
    with torch.no_grad():
        keys, values = ordinary_kv(engine.model, whole)
    at = 4
    for chunk in DOCUMENT.to_chunks():
        kv = stored(engine, chunk)
        assert kv.position == at
        torch.testing.assert_close(kv.keys, keys[:, :, at : at + kv.tokens], atol=1e-5, rtol=0)
        torch.testing.assert_close(kv.values, values[:, :, at : at + kv.tokens], atol=1e-5, rtol=0)
        at += kv.tokens + 1


def computed_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record how many rows each document pass computed."""
    rows: list[int] = []

    class Recorded(precompute.BlendPass):
        def steps(self) -> Steps[None]:
            if self.layers is None:  # the prior's passes run the first layers alone
                rows.append(int((~self.candidates.cached).sum()))
            return super().steps()

    monkeypatch.setattr(precompute, "BlendPass", Recorded)
    return rows


def test_editing_a_document_recomputes_only_what_follows_the_edit(
    make_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(instruction=INSTRUCTION)
    engine.precompute([DOCUMENT], progress=False)
    before = [stored(engine, chunk) for chunk in DOCUMENT.to_chunks()]
    gone = [engine.key(chunk) for chunk in DOCUMENT.to_chunks()[2:]]
    edited = Document("doc", (*PIECES[:2], words(9, 70), PIECES[3]), DOCUMENT.separator)
    rows = computed_rows(monkeypatch)
    report = engine.precompute([edited], progress=False)
    assert (report.computed, report.skipped) == (2, 2)
    separators, lead, fresh = 3, 4, 9 + 15
    assert rows == [lead + separators + fresh]
    chunks = edited.to_chunks()
    assert torch.equal(stored(engine, chunks[1]).keys, before[1].keys)
    other = make_engine(instruction=INSTRUCTION)
    other.precompute([edited], progress=False)
    for chunk in chunks:
        torch.testing.assert_close(
            stored(engine, chunk).keys, stored(other, chunk).keys, atol=1e-5, rtol=0
        )
    old = DOCUMENT.to_chunks()
    assert [engine.store.contains(key) for key in gone] == [False, False]
    assert old[2].text not in engine.registry


def test_long_documents_are_computed_within_a_window(
    make_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = Document("long", tuple(words(10, 200 + i) for i in range(12)), separator=" w77 ")
    engine = make_engine(document_window=44)
    rows = computed_rows(monkeypatch)
    report = engine.precompute([long], progress=False)
    assert report.computed == 12
    assert max(rows) <= 44 + 11
    assert sum(rows) <= 2 * (12 * 11)
    chunk = long.to_chunks()[-1]
    kv = stored(engine, chunk)
    assert 22 - 11 <= kv.position <= 44
    with torch.no_grad():
        text = long.separator.join(long.chunks)
        part = tokens(engine, text)[-(kv.position + kv.tokens) :]
        keys, _ = ordinary_kv(engine.model, part)
    torch.testing.assert_close(kv.keys, keys[:, :, kv.position :], atol=1e-5, rtol=0)


# Several writers


def test_two_writers_leave_no_kv_that_no_document_knows(
    make_engine: EngineFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one replaces the document while the first is storing its older version."""
    here, there = (
        make_engine(
            store=TieredKVStore.open(host_bytes=0, kv_path=tmp_path),
            registry=SharedChunkRegistry(tmp_path / "registry.sqlite"),
            lead_in="document",
        )
        for _ in range(2)
    )
    older = Document("report", tuple(words(8, seed) for seed in range(6)))
    newer = Document("report", (*older.chunks[:2], words(8, 70), words(8, 71)))
    put, stored_so_far = here.store.put, [0]

    def put_meanwhile(key: KVKey, kv: ChunkKV) -> PutResult:
        stored_so_far[0] += 1
        if stored_so_far[0] == 3:
            there.precompute([newer], progress=False)
        return put(key, kv)

    monkeypatch.setattr(here.store, "put", put_meanwhile)
    report = here.precompute([older], progress=False)
    assert report.refused == {"forgotten meanwhile": 4}
    alone = make_engine(lead_in="document")
    alone.precompute([newer], progress=False)
    assert set(there.store.keys()) == set(alone.store.keys())
    assert there.evict_unregistered() == 0
