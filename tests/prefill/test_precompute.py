"""Index time over the fake stack: passes over documents, priors, and ranks that differ."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from cacheblend_rag import TieredKVStore
from cacheblend_rag.blend.rotary import rotated
from cacheblend_rag.kv.chunk_kv import ChunkKV, KVKey, chunk_id, fingerprint
from cacheblend_rag.prefill.lead_in import ChunkPlan
from cacheblend_rag.prefill.precompute import (
    compute_chunks,
    compute_document,
    compute_one_by_one,
    document_plans,
)
from tests.blend.fake_stack import KV_HEADS, LAYERS, VOCABULARY, FakeStack, plain_kv
from tests.prefill.prompts import Ranks

FINGERPRINT = fingerprint({"model": "fake"})
LEAD = (1, 2)


def piece(number: int) -> tuple[int, ...]:
    draw = torch.Generator().manual_seed(number)
    return tuple(torch.randint(3, VOCABULARY, (5 + number % 3,), generator=draw).tolist())


def plan(*before: int, own: int, lead: tuple[int, ...] = LEAD) -> ChunkPlan:
    """A chunk that stands behind some pieces of its document."""
    context = tuple(token for number in before for token in piece(number))
    return ChunkPlan(
        piece(own), lead, context,
        KVKey(chunk_id(piece(own)), FINGERPRINT, chunk_id(context) if context else ""),
    )  # fmt: skip


DOCUMENT = [plan(own=0), plan(0, own=1), plan(0, 1, own=2), plan(0, 1, 2, own=3)]
LONE = plan(own=9)


def tokens_of(chunk: ChunkPlan, *, context: bool = True) -> torch.Tensor:
    return torch.tensor([*chunk.lead, *(chunk.context if context else ()), *chunk.token_ids])


def wanted(chunk: ChunkPlan, *, context: bool = True) -> ChunkKV:
    """A chunk's KV as an ordinary model computes it behind all that stands before it."""
    keys, values, _ = plain_kv(FakeStack(), tokens_of(chunk, context=context))
    start = keys.shape[2] - len(chunk.token_ids)
    return ChunkKV.of(keys[:, :, start:], values[:, :, start:], start)


def wanted_prior(chunk: ChunkPlan) -> torch.Tensor:
    there, here = wanted(chunk), wanted(chunk, context=False)
    by = FakeStack().rotation(there.position - here.position).of(1)
    change = (rotated(here.keys[1][None], by)[0] - there.keys[1]).square().sum((0, 2))
    return change / there.keys[1].square().sum((0, 2)).mean()


def check(chunk: ChunkPlan, found: ChunkKV, *, context: bool = True) -> None:
    reference = wanted(chunk, context=context)
    assert found.position == reference.position
    torch.testing.assert_close(found.keys, reference.keys, atol=1e-4, rtol=0)
    torch.testing.assert_close(found.values, reference.values, atol=1e-4, rtol=0)


def made(steps: Any) -> dict[KVKey, tuple[ChunkPlan, ChunkKV]]:
    return {done[0].key: done for done in steps if done is not None}


def alone_on(stack: FakeStack, store: TieredKVStore) -> Any:
    return lambda chunks: compute_one_by_one(stack, chunks, store)


def compute(
    chunks: Sequence[ChunkPlan],
    store: TieredKVStore | None = None,
    *,
    in_document: bool = True,
    stack: FakeStack | None = None,
) -> dict[KVKey, tuple[ChunkPlan, ChunkKV]]:
    stack, store = stack or FakeStack(), store or TieredKVStore.open()
    return made(
        compute_chunks(stack, chunks, store, alone=alone_on(stack, store), in_document=in_document)
    )


# Plans


def test_chunks_are_grouped_into_as_few_passes_as_their_contexts_allow() -> None:
    windowed = [plan(2, own=3), plan(2, 3, own=4)]
    other_lead = plan(own=5, lead=(7,))
    chunks = [*DOCUMENT, *windowed, LONE, other_lead]
    plans = document_plans(chunks)
    assert [[c for c, _ in each.members] for each in plans] == [
        DOCUMENT, windowed, [LONE], [other_lead],
    ]  # fmt: skip
    for each in plans:
        assert each.tokens == tokens_of(each.members[-1][0]).tolist()
        for chunk, start in each.members:
            here = each.tokens[start : start + len(chunk.token_ids)]
            assert tuple(here) == chunk.token_ids
    assert document_plans([]) == []


# Computing


@pytest.mark.parametrize("in_document", [True, False])
def test_chunks_have_the_kv_and_the_prior_that_their_document_gives(in_document: bool) -> None:
    found = compute([*DOCUMENT, LONE], in_document=in_document)
    assert set(found) == {chunk.key for chunk in (*DOCUMENT, LONE)}
    for chunk in DOCUMENT:
        same, kv = found[chunk.key]
        assert same is chunk
        check(chunk, kv, context=in_document)
        assert kv.prior is not None
        if not chunk.context:
            assert kv.prior.abs().max() < 1e-6
        else:
            torch.testing.assert_close(kv.prior, wanted_prior(chunk), atol=1e-3, rtol=1e-4)
    check(LONE, found[LONE.key][1])
    assert found[LONE.key][1].prior is None


@pytest.mark.parametrize("stored", [(0,), (1,), (3,), (0, 1), (1, 2), (0, 1, 2, 3)], ids=str)
def test_what_is_stored_is_reused_and_not_computed_again(stored: tuple[int, ...]) -> None:
    store, stack = TieredKVStore.open(), FakeStack()
    for index in stored:
        store.put(DOCUMENT[index].key, wanted(DOCUMENT[index]))
    missing = [chunk for i, chunk in enumerate(DOCUMENT) if i not in stored]
    found = compute(DOCUMENT, store, stack=stack)
    assert set(found) == {chunk.key for chunk in missing}
    for chunk, kv in found.values():
        check(chunk, kv)
    if not missing:
        assert stack.log == []
        return
    document = tokens_of(missing[-1]).tolist()
    computed = [*range(len(LEAD))] + [
        position
        for chunk, start in document_plans(DOCUMENT)[0].members
        if chunk in missing
        for position in range(start, start + len(chunk.token_ids))
    ]
    first = next(event for event in stack.log if event.kind == "run" and event.layer == 0)
    assert list(first.rows) == computed
    assert max(computed) == len(document) - 1, "nothing behind the last that is missing"


def test_stored_kv_that_does_not_fit_is_computed_anew_and_stored_again() -> None:
    store = TieredKVStore.open()
    zeros = torch.zeros(LAYERS, KV_HEADS, 2, 8)
    store.put(DOCUMENT[1].key, ChunkKV.of(zeros, zeros, 0))
    found = compute(DOCUMENT, store)
    assert set(found) == {chunk.key for chunk in DOCUMENT}
    for chunk, kv in found.values():
        check(chunk, kv)


def test_others_get_their_turn_between_blocks() -> None:
    stack = FakeStack(row_block=6)
    steps = compute_document(stack, document_plans(DOCUMENT)[0], TieredKVStore.open())
    turns = 0
    for done in steps:
        runs = [event for event in stack.log if event.kind == "run"]
        assert len(runs) <= 2
        stack.log.clear()
        turns += done is None
    assert turns > LAYERS * len(tokens_of(DOCUMENT[-1])) // 6


# Ranks


def test_a_chunk_that_one_rank_lacks_is_computed_by_both() -> None:
    stores = [TieredKVStore.open(), TieredKVStore.open()]
    for index, chunk in enumerate(DOCUMENT[:3]):
        for rank in range(2):
            if (index, rank) != (1, 1):
                stores[rank].put(chunk.key, wanted(chunk))

    def whole(rank: int, stack: FakeStack) -> Any:
        return compute([*DOCUMENT, LONE], stores[rank], stack=stack)

    def single(rank: int, stack: FakeStack) -> Any:
        return made(compute_one_by_one(stack, DOCUMENT[:3], stores[rank]))

    def prior_only(rank: int, stack: FakeStack) -> Any:
        return compute(DOCUMENT, stores[rank], in_document=False, stack=stack)

    assert [set(found) for found in Ranks().run(whole)] == [
        {DOCUMENT[1].key, DOCUMENT[3].key, LONE.key}
    ] * 2
    assert [set(found) for found in Ranks().run(single)] == [{DOCUMENT[1].key}] * 2
    both = Ranks().run(prior_only)
    assert [set(found) for found in both] == [{DOCUMENT[1].key, DOCUMENT[3].key}] * 2
    for found in both:  # each holds all heads here, so the sum over ranks is twice one's
        prior = found[DOCUMENT[1].key][1].prior
        torch.testing.assert_close(prior, wanted_prior(DOCUMENT[1]), atol=1e-3, rtol=1e-4)


def test_stored_kv_that_one_rank_cannot_read_is_computed_by_both() -> None:
    stores = [TieredKVStore.open(), TieredKVStore.open()]
    for store in stores:
        store.put(DOCUMENT[0].key, wanted(DOCUMENT[0]))
    zeros = torch.zeros(LAYERS, KV_HEADS, 2, 8)
    stores[1].put(DOCUMENT[0].key, ChunkKV.of(zeros, zeros, 0))

    def of(rank: int, stack: FakeStack) -> Any:
        return compute(DOCUMENT[:2], stores[rank], stack=stack)

    for found in Ranks().run(of):
        assert set(found) == {chunk.key for chunk in DOCUMENT[:2]}
        for chunk, kv in found.values():
            check(chunk, kv)
