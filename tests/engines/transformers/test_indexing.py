"""Index time: lead-ins, batches, documents and their windows, edits, priors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cacheblend_rag import BlendPrompt, Chunk, ChunkKV, Document, SamplingParams, TieredKVStore
from cacheblend_rag.blend.steps import Steps
from cacheblend_rag.engines.transformers import engine as engine_module
from cacheblend_rag.kv.chunk_kv import KVKey
from cacheblend_rag.kv.put_result import PutResult
from cacheblend_rag.prefill import precompute
from cacheblend_rag.prefill.prompt_pass import CONTEXT_KEPT
from cacheblend_rag.text.sqlite_registry import SharedChunkRegistry
from tests.engines.transformers.conftest import EngineFactory, keys_of
from tests.engines.transformers.test_exactness import ordinary_kv
from tests.models import words

INSTRUCTION = words(4, 50)
PIECES = tuple(words(12 + i, i) for i in range(4))
DOCUMENT = Document("doc", PIECES, separator=" w77 ")
SHORT = SamplingParams(max_tokens=4)


def tokens(engine, text: str) -> torch.Tensor:
    return torch.tensor(engine.tokenizer(text, add_special_tokens=False)["input_ids"])


def stored(engine, chunk: Chunk):
    (key,) = keys_of(engine, chunk)
    found = engine.store.get(key).kv
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


def test_a_whole_document_reused_in_place_is_exact(make_engine: EngineFactory) -> None:
    engine = make_engine(instruction=INSTRUCTION, recompute_ratio=0.0)
    engine.precompute([DOCUMENT], progress=False)
    parts: list[str | Chunk] = [f"{INSTRUCTION}\n"]
    for chunk in DOCUMENT.to_chunks():
        parts += [chunk, DOCUMENT.separator]
    prompt = BlendPrompt.of(*parts[:-1], f"\n{words(6, 60)}")
    blended, full = engine.generate(prompt, SHORT), engine.generate_full(prompt, SHORT)
    assert blended.report.reused_tokens == sum(12 + i for i in range(4))
    assert blended.token_ids == full.token_ids


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
    gone = [keys_of(engine, chunk)[0] for chunk in DOCUMENT.to_chunks()[2:]]
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


def test_stored_kv_of_another_shape_is_no_part_of_a_document_pass(
    make_engine: EngineFactory,
) -> None:
    engine, other = make_engine(instruction=INSTRUCTION), make_engine(instruction=INSTRUCTION)
    other.precompute([DOCUMENT], progress=False)
    chunks = DOCUMENT.to_chunks()
    wrong = torch.zeros(4, 2, 3, 16)
    engine.store.put(keys_of(other, chunks[1])[0], ChunkKV(wrong, wrong, 0))
    engine.precompute([DOCUMENT], progress=False)
    for chunk in chunks:
        torch.testing.assert_close(
            stored(engine, chunk).keys, stored(other, chunk).keys, atol=1e-5, rtol=0
        )


def test_what_is_stored_is_skipped_in_the_next_process(
    make_engine: EngineFactory, tmp_path
) -> None:
    first = make_engine(store=TieredKVStore.open(kv_path=tmp_path))
    first.precompute([DOCUMENT], progress=False)
    first.close()
    second = make_engine(store=TieredKVStore.open(kv_path=tmp_path))
    report = second.precompute([DOCUMENT], progress=False)
    assert (report.computed, report.skipped) == (0, 4)
    text = f"{DOCUMENT.separator.join(PIECES)} w9"
    assert [c.tier for c in second.generate(text, SHORT).report.chunks] == ["disk"] * 4


def test_an_interrupted_run_goes_on_where_it_stopped(
    make_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    others = [Document(f"d{i}", (words(8, 80 + i), words(8, 90 + i))) for i in range(3)]
    compute = engine_module.compute_chunks

    def interrupted(*wanted, **named):
        computed = 0
        for done in compute(*wanted, **named):
            if computed == 3:
                raise KeyboardInterrupt
            computed += done is not None
            yield done

    with monkeypatch.context() as patch:
        patch.setattr(engine_module, "compute_chunks", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.precompute(others, progress=False)
    report = engine.precompute(others, progress=False)
    assert (report.computed, report.skipped) == (3, 3)


def test_one_text_in_two_documents_has_two_kvs_and_hints_choose(make_engine: EngineFactory) -> None:
    engine = make_engine(recompute_ratio=0.0)
    shared = words(20, 1)
    documents = [Document(name, (words(15, i), shared)) for i, name in enumerate("ab", 2)]
    engine.precompute(documents, progress=False)
    chunks = [document.to_chunks()[1] for document in documents]
    assert keys_of(engine, chunks[0]) == keys_of(engine, chunks[1])
    assert len(set(keys_of(engine, chunks[0]))) == 3, "and one for whoever means neither"
    prompt = f"w3 {shared} w4"
    for name, chunk in zip("ab", chunks, strict=True):
        for hint in (name, chunk):
            found = engine.generate(prompt, SHORT, hints=[hint]).report.chunks
            assert [(c.hit, c.document_id) for c in found] == [(True, name)]


def test_deleting_a_document_drops_its_kv(make_engine: EngineFactory) -> None:
    engine = make_engine()
    engine.precompute([DOCUMENT, Document("other", (words(9, 5),))], progress=False)
    assert engine.evict_document("doc") == 4
    assert len(engine.store.keys()) == 1
    assert PIECES[0] not in engine.registry
    assert engine.evict_document("doc") == 0


def test_kv_that_another_document_shares_is_kept(make_engine: EngineFactory) -> None:
    engine = make_engine(recompute_ratio=0.0)
    opening = words(20, 1)
    engine.precompute(
        [Document(name, (opening, words(9, i))) for i, name in enumerate("ab", 2)], progress=False
    )
    assert len(engine.store.keys()) == 3
    assert engine.evict_document("a") == 1
    report = engine.generate(f"{opening} w4", SHORT).report
    assert [(c.hit, c.document_id) for c in report.chunks] == [(True, "b")]


@pytest.mark.parametrize("lead_in", ["bos", "document"])
def test_many_items_are_computed_part_by_part(make_engine: EngineFactory, lead_in: str) -> None:
    engine = make_engine(lead_in=lead_in)
    items = [
        *(
            Document(f"d{i}", (words(3, i), words(4, 100 + i), words(5, 200 + i)))
            for i in range(30)
        ),
        *(Chunk(words(6, 300 + i)) for i in range(80)),
    ]
    report = engine.precompute([*items, *items[:5]], progress=False)
    assert (report.computed, report.skipped) == (90 + 80, 15)
    assert len(engine.store.keys()) == 170


def test_the_prior_is_nothing_where_nothing_precedes_and_something_after(
    make_engine: EngineFactory,
) -> None:
    for lead_in in ("document", "instruction"):
        engine = make_engine(lead_in=lead_in, instruction=INSTRUCTION)
        engine.precompute([DOCUMENT, Chunk(words(9, 9))], progress=False)
        priors = [stored(engine, chunk).prior for chunk in DOCUMENT.to_chunks()]
        assert priors[0] is not None
        assert priors[0].abs().max() < 1e-6
        assert all(p is not None and (p > 1e-4).all() for p in priors[1:])
        assert stored(engine, Chunk(words(9, 9))).prior is None


@pytest.mark.parametrize("lead_in", ["document", "instruction"])
def test_the_prior_is_how_far_the_document_moves_layer_one_keys(
    make_engine: EngineFactory, lead_in: str
) -> None:
    engine = make_engine(lead_in=lead_in, instruction=INSTRUCTION)
    engine.precompute([DOCUMENT], progress=False)
    chunk = DOCUMENT.to_chunks()[2]
    whole = tokens(engine, f"{INSTRUCTION} {DOCUMENT.separator.join(PIECES[:3])}")
    alone = tokens(engine, f"{INSTRUCTION} {PIECES[2]}")
    with torch.no_grad():
        there = ordinary_kv(engine.model, whole)[0][1, :, -14:]
        here = ordinary_kv(engine.model, alone)[0][1, :, -14:]
    half = here.shape[-1] // 2
    angle = (whole.numel() - alone.numel()) * engine.model.model.rotary_emb.inv_freq
    plain = torch.complex(here[..., :half], here[..., half:])
    turned = plain * torch.complex(angle.cos(), angle.sin())
    wanted = (torch.cat([turned.real, turned.imag], -1) - there).square().sum((0, 2))
    wanted /= there.square().sum((0, 2)).mean()
    found = stored(engine, chunk).prior
    assert found is not None
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-3)


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


def test_context_that_the_prompt_lacks_is_protected(make_engine: EngineFactory) -> None:
    engine = make_engine(selector="chunk_head", recompute_ratio=0.5, protect_context=1)
    engine.precompute([DOCUMENT], progress=False)
    lone = engine.generate(f"w3 {PIECES[1]} w4", SHORT).report
    assert lone.recomputed_tokens == 0
    assert (lone.selector, lone.selector_reason) == ("none", CONTEXT_KEPT)
    assert lone.reason is None
    whole = engine.generate(f"{PIECES[0]} w77 {PIECES[1]} w4", SHORT).report
    assert whole.chunks[0].recomputed > 0, "a first chunk has no context to forget"
    assert whole.chunks[1].recomputed == 0, "w77 stands between chunks, in none of them"
    plain = Document("plain", PIECES, separator="\n")
    engine.precompute([plain], progress=False)
    whole = engine.generate(f"{PIECES[0]}\n{PIECES[1]} w4", SHORT, hints=["plain"]).report
    assert whole.chunks[1].recomputed > 0
    shuffled = engine.generate(f"{PIECES[0]}\n{PIECES[2]}\n{PIECES[1]} w4", SHORT, hints=["plain"])
    assert [c.recomputed > 0 for c in shuffled.report.chunks] == [True, False, False]
    everything = engine.config.with_changes(recompute_ratio=1.0)
    assert engine.generate(f"w3 {PIECES[1]} w4", SHORT, config=everything).report.reused_tokens == 0


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


def test_kv_that_no_document_knows_can_be_dropped(make_engine: EngineFactory) -> None:
    engine = make_engine(lead_in="document")
    engine.precompute([DOCUMENT], progress=False)
    kept = set(engine.store.keys())
    foreign = make_engine(lead_in="document", store=engine.store, namespace="other")
    foreign.precompute(["w1 w2 w3"], progress=False)
    lost = Document("lost", tuple(words(8, seed) for seed in range(3)))
    engine.precompute([lost], progress=False)
    engine.registry.discard_many(engine.registry.document("lost"))
    assert engine.evict_unregistered() == 3
    assert {key for key in engine.store.entries() if key.fingerprint == engine.fingerprint} == kept
    assert len(engine.store.keys()) == len(kept) + 1, "others' KV is theirs"


def test_two_indexes_over_one_document_live_side_by_side(make_engine: EngineFactory) -> None:
    engine = make_engine(instruction=INSTRUCTION, recompute_ratio=0.0)
    coarse = Document("doc", (words(30, 0), words(30, 30)), " ", collection="coarse")
    fine = Document("doc", tuple(words(10, n) for n in range(0, 60, 10)), " ", collection="fine")
    shared = Document("doc", (words(30, 0),), " ", collection="head")

    def reused(document: Document) -> int:
        prompt = f"{INSTRUCTION} {document.chunks[0]} w99 {document.chunks[-1]} {words(3, 70)}"
        return engine.generate(prompt, SHORT).report.reused_tokens

    for document in (coarse, fine, shared):
        engine.precompute([document], progress=False)
    assert (reused(coarse), reused(fine)) == (60, 20)
    changed = Document("doc", (words(30, 0), words(30, 31)), " ", collection="coarse")
    assert engine.precompute([changed], progress=False).replaced == 1
    assert (reused(changed), reused(fine)) == (60, 20)
    assert engine.evict_document("doc", "coarse") == 1  # its first chunk is another index's, too
    assert engine.registry.document("doc", "coarse") == ()
    assert reused(shared) == 60
    assert reused(fine) == 20
    assert engine.evict_document("doc") == 7  # six fine ones and the shared one
    assert len(engine.registry) == len(engine.store.entries()) == 0
