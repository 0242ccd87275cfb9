"""The buffer of a prompt's KV: what is laid down, written and read."""

from __future__ import annotations

import pytest
import torch

from cacheblend_rag.blend.fused import FusedKV, RingKV
from cacheblend_rag.blend.rows import Rows
from cacheblend_rag.kv.chunk_kv import ChunkKV
from tests.blend.fake_stack import HEAD_DIM, KV_HEADS, LAYERS, FakeStack, Reference, plain_kv

CPU = torch.device("cpu")
TOKENS = 20


def numbered() -> FusedKV:
    fused = FusedKV(FakeStack().geometry, TOKENS, reserve=3)
    fused.keys[:] = torch.arange(fused.keys.numel()).view_as(fused.keys)
    fused.values[:] = -fused.keys
    return fused


def place(fused: FusedKV, stack: FakeStack, kv: ChunkKV, start: int) -> None:
    """Lay a chunk's KV down, a layer at a time."""
    turn = stack.rotation(start - kv.position) if start != kv.position else None
    for layer, part in enumerate(zip(kv.keys, kv.values, strict=True)):
        fused.place(layer, start, *part, turn and turn.of(layer))


@pytest.mark.parametrize("start", [0, 4, 11])
def test_a_chunk_is_laid_where_it_stands(start: int) -> None:
    """Its first layer's keys, which depend on nothing else, are those computed there."""
    stack, ids = FakeStack(), torch.arange(TOKENS) * 7 % 50
    keys, values, _ = plain_kv(stack, ids[start - 2 if start else 0 : start + 6])
    lead = 2 if start else 0
    kv = ChunkKV.of(keys[:, :, lead:].clone(), values[:, :, lead:].clone(), lead)
    fused = numbered()
    before = fused.keys.clone()
    place(fused, stack, kv, start)
    here = slice(start, start + kv.tokens)
    there = Reference(stack, ids, torch.zeros(LAYERS, KV_HEADS, TOKENS, HEAD_DIM), keys).fresh(0)
    torch.testing.assert_close(fused.keys[0, :, here], there[0][:, here], atol=1e-5, rtol=0)
    torch.testing.assert_close(fused.values[0, :, here], there[1][:, here], atol=1e-5, rtol=0)
    assert torch.equal(fused.values[:, :, here], kv.values)
    assert torch.equal(fused.keys[:, :, : here.start], before[:, :, : here.start])
    assert torch.equal(fused.keys[:, :, here.stop :], before[:, :, here.stop :])


@pytest.mark.parametrize("positions", [(3, 4, 5), (3,), (0, 7, 19), (1, 2, 5)], ids=str)
def test_rows_are_written_in_one_layer_and_nowhere_else(positions: tuple[int, ...]) -> None:
    fused, wanted = numbered(), numbered()
    keys, values = torch.rand(2, 1, KV_HEADS, len(positions), HEAD_DIM).unbind()
    fused.write(1, Rows.at(torch.tensor(positions).numpy(), CPU), keys, values)
    for index, position in enumerate(positions):
        wanted.keys[1, :, position] = keys[0, :, index]
        wanted.values[1, :, position] = values[0, :, index]
    assert torch.equal(fused.keys, wanted.keys)
    assert torch.equal(fused.values, wanted.values)


def test_a_ring_is_two_layers_of_which_the_later_takes_the_place_of_the_older() -> None:
    whole, ring = numbered(), RingKV(FakeStack().geometry, TOKENS)
    assert ring.keys.shape == ring.values.shape == (2, KV_HEADS, TOKENS, HEAD_DIM)
    assert ring.tokens == TOKENS
    held = ring.keys.nbytes + ring.values.nbytes
    assert RingKV.bytes_for(FakeStack().geometry, TOKENS) == held
    assert not ring.keeps_layers
    for layer in range(LAYERS):
        keys, values = (part[:, :TOKENS] for part in whole.of_layer(layer))
        ring.place(layer, 0, keys, values, None)
        ring.write(
            layer,
            Rows.at(torch.tensor([3, 7]).numpy(), CPU),
            *(torch.ones(2, 1, KV_HEADS, 2, HEAD_DIM)),
        )
        keys[:, [3, 7]] = values[:, [3, 7]] = 1.0
        for held in (layer - 1, layer) if layer else (layer,):
            for part, wanted in zip(ring.layer(held), whole.layer(held), strict=True):
                assert torch.equal(part, wanted)
    assert torch.equal(ring.of_layer(LAYERS - 3)[0], whole.of_layer(LAYERS - 1)[0][:, :TOKENS])


# Rows


def test_rows_know_their_bounds_runs_and_pairs() -> None:
    rows = Rows.where(torch.tensor([0, 1, 0, 1, 1, 0, 1, 0], dtype=torch.bool).numpy(), CPU)
    assert rows.host.tolist() == rows.device.tolist() == [1, 3, 4, 6]
    assert (len(rows), rows.first, rows.last, rows.is_run) == (4, 1, 6, False)
    assert rows.part(1, 3).is_run
    assert rows.part(0, 9) is rows.part(0, len(rows)) is rows
    assert rows.part(0, 3).host.tolist() == rows.part(0, 3).device.tolist() == [1, 3, 4]
    assert rows.part(1, 4).host.tolist() == rows.part(1, 4).device.tolist() == [3, 4, 6]
    assert rows.pairs(None) == rows.pairs(None) == 2 + 4 + 5 + 7
    assert rows.pairs(4) == 2 + 4 + 4 + 4
    assert rows.pairs(4) == sum(min(i + 1, 4) for i in (1, 3, 4, 6))
