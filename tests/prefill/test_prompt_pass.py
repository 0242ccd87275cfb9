"""The pass over a prompt's stored chunks, over the fake stack: hits, misses, rows, ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cacheblend_rag import BlendConfig, TieredKVStore
from cacheblend_rag.blend import BlendPass, FusedKV, plan_schedule
from cacheblend_rag.blend.cost import prefill_cost
from cacheblend_rag.blend.passes import Candidates
from cacheblend_rag.blend.question_probe import probe_question
from cacheblend_rag.blend.rotary import rotated
from cacheblend_rag.blend.selectors import SELECTORS, Question
from cacheblend_rag.blend.steps import run_to_end
from cacheblend_rag.kv import DiskTier, codec
from cacheblend_rag.kv.chunk_kv import ChunkKV, KVKey, fingerprint
from cacheblend_rag.prefill.lead_in import PlacedChunk
from cacheblend_rag.prefill.prompt_pass import FusedPrompt
from tests.blend.fake_stack import LAYERS, FakeStack
from tests.prefill.prompts import (
    LEAD,
    QUESTION,
    SPANS,
    TOKENS,
    Decides,
    Ranks,
    chunk_kv,
    filled,
    finished,
    placed,
    prompt_ids,
    prompt_pass,
    run,
)


def by_hand(
    config: BlendConfig,
    hits: str = "abc",
    protected: str = "",
    lost: tuple[int, int] = (0, 0),
    **options: Any,
) -> Any:
    """The same prompt put together here: chunks laid down, and one blend pass over them.

    lost: tokens at each chunk's edges that are not taken from it.
    """
    stack, fused = FakeStack(), FusedKV(FakeStack().geometry, TOKENS)
    known = Candidates.none(TOKENS)
    known.prior = torch.zeros(TOKENS)
    for chunk, name in zip(placed(), SPANS, strict=True):
        if name in hits:
            kv, here = chunk_kv(stack, chunk), slice(chunk.start + lost[0], chunk.end - lost[1])
            own = slice(lost[0], kv.tokens - lost[1])
            moved = rotated(kv.keys, stack.rotation(chunk.start - LEAD))
            fused.keys[:, :, here] = moved[:, :, own]
            fused.values[:, :, here] = kv.values[:, :, own]
            assert kv.prior is not None
            known.cached[here] = known.eligible[here] = True
            if name in protected and config.recompute_ratio != 1:
                known.eligible[here] = free_by_hand(kv.prior[own].tolist(), config.protect_context)
            known.offsets[here], known.prior[here] = torch.arange(kv.tokens)[own], kv.prior[own]
    schedule, work = plan_schedule(config, LAYERS), 0.0
    if isinstance(schedule.selector, Question) and 0 < schedule.ratio < 1:
        ids, asked = prompt_ids(), schedule.selector
        known.question_attention, work = run(
            probe_question(stack, ids, fused, known, QUESTION, question=asked)
        )
    done = BlendPass(stack, prompt_ids(), fused, known, schedule, **options)
    run_to_end(done.steps())
    done.work += work
    return done


def free_by_hand(prior: list[float], share: float) -> torch.Tensor:
    """Which tokens are left once the greatest priors that add up to a share are taken away."""
    free, held = dict(enumerate(prior)), 0.0
    while free and held < share * sum(prior):
        best = max(free, key=lambda token: free[token])
        held += free.pop(best)
    return torch.tensor([token in free for token in range(len(prior))])


@pytest.mark.parametrize("selector", SELECTORS)
@pytest.mark.parametrize("hits", ["abc", "ac"])
def test_a_prompt_is_its_chunks_laid_down_and_one_pass(selector: str, hits: str) -> None:
    config = BlendConfig(selector=selector, recompute_ratio=0.3)
    found = finished(prompt_pass(filled(placed(names=hits)), placed(), **vars_of(config)))
    wanted = by_hand(config, hits)
    assert torch.equal(found.fused.keys, wanted.fused.keys)
    assert torch.equal(found.fused.values, wanted.fused.values)
    assert found.hidden is not None
    assert torch.equal(found.hidden, wanted.hidden)
    assert found.compute_share == wanted.work / prefill_cost(FakeStack().costs, TOKENS)
    assert (found.selector, found.ratio) == (selector, wanted.schedule.ratio)
    assert found.blended
    for report, name in zip(found.chunks, SPANS, strict=True):
        start, end = SPANS[name]
        assert (report.start, report.tokens, report.hit) == (start, end - start, name in hits)
        assert report.tier == ("host" if report.hit else None)
        assert report.reason == (None if report.hit else "not stored")
        assert report.document_id == f"doc {name}"
        assert report.recomputed == int(wanted.recomputed[start:end].sum())


def cut(chunks: list[PlacedChunk], lost: tuple[int, int]) -> list[PlacedChunk]:
    """The chunks where a prompt has other tokens at their edges."""
    before, after = lost
    return [
        replace(one, start=one.start + before, end=one.end - after, before=before, after=after)
        for one in chunks
    ]


@pytest.mark.parametrize("selector", SELECTORS)
@pytest.mark.parametrize("lost", [(1, 0), (0, 1), (2, 3)])
def test_of_a_run_the_inner_part_of_the_stored_chunk_is_used(
    selector: str, lost: tuple[int, int]
) -> None:
    config = BlendConfig(selector=selector, recompute_ratio=0.3)
    run_pass = prompt_pass(filled(placed()), cut(placed(), lost), **vars_of(config))
    found, wanted = finished(run_pass), by_hand(config, lost=lost)
    assert torch.equal(found.fused.keys, wanted.fused.keys)
    assert torch.equal(found.fused.values, wanted.fused.values)
    told = [(c.hit, c.tokens + sum(lost), c.edge_tokens) for c in found.chunks]
    assert told == [(True, end - start, sum(lost)) for start, end in SPANS.values()]


def vars_of(config: BlendConfig) -> dict[str, Any]:
    return {"selector": config.selector, "recompute_ratio": config.recompute_ratio}


# What is known of chunks


@pytest.mark.parametrize("selector", ["random", "hkvd", "prior", "question_mid"])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.9, 1.0])
def test_of_a_protected_chunk_only_what_hardly_depends_on_its_document_is_recomputed(
    selector: str, share: float
) -> None:
    store, chunks = filled(placed()), placed(protected="b")
    config = {"recompute_ratio": 0.9, "selector": selector, "protect_context": share}
    found = finished(prompt_pass(store, chunks, **config))
    wanted = by_hand(BlendConfig(**config), protected="b")
    assert torch.equal(found.fused.keys, wanted.fused.keys)
    assert [chunk.recomputed for chunk in found.chunks] == [
        int(wanted.recomputed[start:end].sum()) for start, end in SPANS.values()
    ]
    assert share < 1 or found.chunks[1].recomputed == 0


def test_at_ratio_one_nothing_is_protected() -> None:
    everything = finished(prompt_pass(filled(placed()), placed(protected="b"), recompute_ratio=1.0))
    assert [chunk.recomputed for chunk in everything.chunks] == [7, 6, 8]
    assert everything.selector == BlendConfig().selector


@pytest.mark.parametrize(("share", "recomputed"), [(0.1, [7, 0, 8]), (0.0, [7, 6, 8])])
def test_a_chunk_without_a_prior_is_protected_whole(share: float, recomputed: list[int]) -> None:
    chunks = placed(protected="b")
    store = filled(chunks)
    store.put(chunks[1].key, chunk_kv(FakeStack(), chunks[1], prior=False))
    config = {"selector": "random", "recompute_ratio": 0.999, "protect_context": share}
    found = finished(prompt_pass(store, chunks, **config))
    assert [chunk.recomputed for chunk in found.chunks] == recomputed


def test_kv_of_another_shape_is_damage_and_that_of_another_model_is_named() -> None:
    chunks = placed()
    store = filled(chunks[2:])
    cut = chunk_kv(FakeStack(), chunks[0])
    store.put(chunks[0].key, ChunkKV.of(cut.keys[:, :, 1:], cut.values[:, :, 1:], LEAD))
    other = KVKey(chunks[1].key.chunk_id, fingerprint({"model": "another"}))
    store.put(other, cut)
    found = finished(prompt_pass(store, chunks, recompute_ratio=0.3))
    assert [chunk.reason for chunk in found.chunks] == ["damaged", "other model", None]
    assert torch.equal(found.fused.keys, by_hand(BlendConfig(recompute_ratio=0.3), "c").fused.keys)


# Ranks


def test_what_one_rank_lacks_is_a_miss_on_both() -> None:
    """Neither blends what the other has not: they would wait for each other in the midst."""
    stores = [filled(placed(names="abc")), filled(placed(names="ac"))]

    def of(rank: int, stack: FakeStack) -> FusedPrompt:
        return finished(prompt_pass(stores[rank], placed(), stack, recompute_ratio=0.3))

    both = Ranks().run(of)
    wanted = by_hand(BlendConfig(recompute_ratio=0.3), "ac")
    for found in both:
        assert [chunk.hit for chunk in found.chunks] == [True, False, True]
        assert [chunk.reason for chunk in found.chunks] == [None, "not stored", None]
        assert [chunk.tier for chunk in found.chunks] == ["host", None, "host"]
        assert torch.equal(found.fused.keys, wanted.fused.keys)
    stores.reverse()
    assert [chunk.hit for chunk in Ranks().run(of)[0].chunks] == [True, False, True]


def test_a_prior_that_one_rank_lacks_is_none() -> None:
    stores = [filled(placed()), filled(placed(names="ac"))]
    stores[1].put(placed()[1].key, chunk_kv(FakeStack(), placed()[1], prior=False))

    def of(rank: int, stack: FakeStack) -> FusedPrompt:
        return finished(
            prompt_pass(stores[rank], placed(), stack, selector="prior", recompute_ratio=0.3)
        )

    one, other = Ranks().run(of)
    assert torch.equal(one.fused.keys, other.fused.keys)
    assert [chunk.recomputed for chunk in one.chunks] == [c.recomputed for c in other.chunks]
    assert one.chunks[1].recomputed == 0
    stores[0] = filled(placed(), prior=False)
    named = [(found.selector, found.selector_reason) for found in Ranks().run(of)]
    assert named == [("chunk_head", "no prior stored for prior")] * 2


# Whether it is worth it, by what is found


def test_chunks_that_cannot_be_read_are_not_said_to_be_absent(tmp_path: Path) -> None:
    chunks = placed()
    with TieredKVStore([DiskTier(tmp_path)]) as store:
        store.put(chunks[0].key, chunk_kv(FakeStack(), chunks[0]))
        (file,) = tmp_path.rglob("*.safetensors")
        file.write_bytes(b"rubbish")
        refused = run(prompt_pass(store, chunks).steps())
    assert not isinstance(refused, FusedPrompt)
    assert refused.reason == "no stored chunk could be read"
    assert [chunk.reason for chunk in refused.chunks] == ["damaged", "not stored", "not stored"]


@pytest.mark.parametrize("lacking", [0, 1])
def test_ranks_agree_on_what_is_too_little(lacking: int) -> None:
    """One has all chunks, the other lacks one: together that is too little."""

    def of(rank: int, stack: FakeStack) -> tuple[str, int]:
        store = filled(placed(names="ac" if rank == lacking else "abc"))
        refused = run(prompt_pass(store, placed(), stack, min_tokens=16).steps())
        assert not isinstance(refused, FusedPrompt)
        return refused.reason, len(stack.log)

    assert Ranks().run(of) == [("15 reusable tokens are fewer than min_tokens=16", 0)] * 2


def test_without_room_nothing_is_computed_and_too_little_goes_before() -> None:
    stack, options = FakeStack(), {"lack_of_room": lambda: "there is less"}
    refused = run(prompt_pass(filled(placed()), placed(), stack, options).steps())
    assert not isinstance(refused, FusedPrompt)
    assert refused.reason == "no room: there is less"
    assert [chunk.reason for chunk in refused.chunks] == ["no room"] * 3
    little = run(prompt_pass(filled(placed()), placed(), stack, options, min_tokens=99).steps())
    assert "fewer than min_tokens=99" in little.reason
    assert not stack.log


# What is loaded by measured speeds


def decides(keep: str = "abc", why: str | None = None) -> Decides:
    return Decides([SPANS[name][0] for name in keep], why)


@pytest.mark.parametrize("selector", ["hkvd", "prior"])
def test_what_is_not_worth_loading_is_computed(selector: str) -> None:
    controller = decides("ac", why="too slow")
    options = {"controller": controller}
    found = finished(prompt_pass(filled(placed()), placed(), None, options, selector=selector))
    wanted = by_hand(BlendConfig(selector=selector), "ac")
    assert torch.equal(found.fused.keys, wanted.fused.keys)
    assert torch.equal(found.hidden, wanted.hidden)  # type: ignore[arg-type]
    assert [chunk.reason for chunk in found.chunks] == [None, "slow", None]
    assert found.ratio_reason == "too slow"
    assert [(part.tier, part.nbytes) for part in controller.parts] == [("host", 0)] * 3
    assert controller.rates.of("blend") is not None


def test_ranks_do_what_the_first_one_decides() -> None:
    store = filled(placed())

    def of(rank: int, stack: FakeStack) -> list[str | None]:
        options = {"controller": decides("ab" if rank == 0 else "c")}
        found = run(prompt_pass(store, placed(), stack, options, selector="prior").steps())
        assert isinstance(found, FusedPrompt)
        return [chunk.reason for chunk in found.chunks]

    assert Ranks().run(of) == [[None, None, "slow"]] * 2


def test_reading_a_tier_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DiskTier, "whole_bytes", 0)
    monkeypatch.setattr(codec, "HEAD_BYTES", 1024)
    chunks, controller = placed(), decides()
    with TieredKVStore([DiskTier(tmp_path)]) as store:
        for chunk in chunks:
            store.put(chunk.key, chunk_kv(FakeStack(), chunk))
        finished(prompt_pass(store, chunks, None, {"controller": controller}))
    assert {part.tier for part in controller.parts} == {"disk"}
    assert all(part.nbytes > 0 for part in controller.parts)
    assert controller.speeds.of("disk") is not None
