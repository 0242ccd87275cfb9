"""What a pass holds at most, of different lengths: two layers of KV, its rows, and a constant."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cacheblend_rag import BlendConfig, TieredKVStore
from cacheblend_rag.blend import FusedKV, RingKV
from cacheblend_rag.blend.rows import Rows
from cacheblend_rag.blend.stack import AttentionCall, Geometry
from cacheblend_rag.kv.chunk_kv import ChunkKV, KVKey, chunk_id
from cacheblend_rag.prefill.lead_in import ChunkPlan, PlacedChunk
from cacheblend_rag.prefill.precompute import DocumentPlan, compute_document
from cacheblend_rag.prefill.prompt_pass import Destination, PromptPass
from tests.blend.fake_stack import HEAD_DIM, HIDDEN, KV_HEADS, VOCABULARY, FakeStack
from tests.memory import PeakBytes
from tests.prefill.prompts import FINGERPRINT, run

DEPTH, CHUNK, ROW_BLOCK = 16, 512, 64
ROW_BYTES = 16 * HIDDEN * 4
"""Of one row in a layer: hidden states, projections and what the layer makes of them."""
TOKEN_BYTES = 128
"""Of one token on the host: its id, what is known of it, and its bounds in an index."""
CONSTANT = 1 << 20


def shallow(call: AttentionCall, fused: FusedKV, rows: Rows) -> Tensor:
    """Stands in for a kernel that attends over the paged cache and takes no memory of its own."""
    return call.query.transpose(1, 2)


class Ring(Destination):
    """A ring."""

    def buffer(self, geometry: Geometry, tokens: int) -> RingKV:
        return RingKV(geometry, tokens)


def bound(stack: FakeStack, tokens: int, rows: int) -> int:
    ring = RingKV.bytes_for(stack.geometry, tokens)
    return ring + rows * ROW_BYTES + tokens * TOKEN_BYTES + CONSTANT


def scores(stack: FakeStack, tokens: int) -> int:
    """Of a block of rows whose attention is laid out, as the question's is, once."""
    return stack.geometry.heads * ROW_BLOCK * tokens * 4


@pytest.mark.parametrize(
    ("tokens", "selector"), [(8192, "prior"), (4096, "hkvd"), (4096, "question_mid")]
)
def test_a_pass_over_a_ring_holds_two_layers(tokens: int, selector: str) -> None:
    stack = FakeStack(windows=(None,) * DEPTH, row_block=ROW_BLOCK)
    ids = torch.arange(tokens) % VOCABULARY
    placed, store = [], TieredKVStore.open()
    for number, start in enumerate(range(8, tokens - 8 - CHUNK + 1, CHUNK)):
        key = KVKey(chunk_id([number]), FINGERPRINT)
        keys, values = torch.randn(2, DEPTH, KV_HEADS, CHUNK, HEAD_DIM).unbind()
        store.put(key, ChunkKV.of(keys, values, 2, torch.rand(CHUNK)))
        placed.append(PlacedChunk(key, start, start + CHUNK))
    config = BlendConfig(selector=selector, recompute_ratio=0.05)
    with store.fetch(chunk.key for chunk in placed) as source, PeakBytes() as memory:
        ring = Ring(needs_hidden=False, attention=shallow)
        work = PromptPass(stack, ids, placed, source, config, destination=ring)
        done = run(work.steps())
    assert all(chunk.hit for chunk in done.chunks)
    # With a check layer, all rows are carried until there.
    rows = tokens if selector == "hkvd" else tokens // 8
    most = bound(stack, tokens, rows) + (
        3 * scores(stack, tokens) if selector == "question_mid" else 0
    )
    assert RingKV.bytes_for(stack.geometry, tokens) < memory.peak <= most
    if selector == "prior":
        assert memory.peak < FusedKV.bytes_for(stack.geometry, tokens) / 2


@pytest.mark.parametrize("tokens", [1024, 2048])
def test_a_document_is_computed_over_two_layers_and_its_chunks(tokens: int) -> None:
    stack = FakeStack(windows=(None,) * DEPTH, row_block=ROW_BLOCK)
    ids = [number % VOCABULARY for number in range(tokens)]
    last = ChunkPlan(ids[-CHUNK:], [], ids[:-CHUNK], KVKey(chunk_id([1]), FINGERPRINT))
    plan = DocumentPlan(ids, [(last, tokens - CHUNK)])
    with TieredKVStore.open() as store, PeakBytes() as memory:
        found = [each for each in compute_document(stack, plan, store) if each is not None]
    (kv,) = [kv for _, kv in found]
    assert kv.tokens == CHUNK
    most = bound(stack, tokens, tokens) + kv.nbytes + 4 * scores(stack, tokens)
    assert memory.peak <= most
