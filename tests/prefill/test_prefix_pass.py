"""The pass over a prompt whose first tokens have exact KV, over the fake stack."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch

from cacheblend_rag import TieredKVStore
from cacheblend_rag.kv.chunk_kv import ChunkKV, KVKey, chunk_id
from cacheblend_rag.prefill.lead_in import PlacedChunk
from cacheblend_rag.prefill.prompt_pass import FusedPrompt, PromptPass
from tests.blend.fake_stack import FakeStack, plain_kv
from tests.prefill.prompts import (
    FINGERPRINT,
    SPANS,
    Ranks,
    filled,
    finished,
    placed,
    prompt_ids,
    prompt_pass,
    run,
)

BEFORE = SPANS["a"][0]
"""Tokens before the first chunk: as many blocks, of one token each."""
BLOCKS = [
    PlacedChunk(
        KVKey(chunk_id(prompt_ids()[: at + 1].tolist()), FINGERPRINT),
        at, at + 1, is_exact=True, is_block=True,
    )
    for at in range(20)
]  # fmt: skip


def stored(blocks: Iterable[int], chunks: str = "abc") -> TieredKVStore:
    """Return a store with some chunks, and some blocks of the prompt's own KV."""
    store = filled(placed(names=chunks))
    keys, values, _ = plain_kv(FakeStack(), prompt_ids())
    for block in blocks:
        here = BLOCKS[block]
        parts = (part[:, :, here.start : here.end].clone() for part in (keys, values))
        store.put(here.key, ChunkKV.of(*parts, position=here.start))
    return store


def over(
    store: TieredKVStore,
    stack: FakeStack | None = None,
    count: int = BEFORE,
    *,
    chunks: bool = True,
    controller: Any = None,
    **config: Any,
) -> PromptPass:
    parts = [*BLOCKS[:count], *(placed() if chunks else ())]
    config = {"recompute_ratio": 0.3, **config}
    return prompt_pass(store, parts, stack, {"controller": controller}, **config)


def same(one: FusedPrompt, other: FusedPrompt) -> None:
    assert one.hidden is not None
    assert other.hidden is not None
    torch.testing.assert_close(one.hidden, other.hidden)
    torch.testing.assert_close(one.fused.keys, other.fused.keys)
    torch.testing.assert_close(one.fused.values, other.fused.values)
    assert one.chunks == other.chunks


@pytest.mark.parametrize("selector", ["hkvd", "prior", "question_mid", "all", "none"])
@pytest.mark.parametrize("there", [(0, 1, 2), (0, 2), (2,), ()])
def test_stored_blocks_replace_computing_and_change_nothing(
    selector: str, there: tuple[int, ...]
) -> None:
    """Also behind a block that is missing: each token's KV is exact in itself."""
    alone = finished(over(stored([]), count=0, selector=selector))
    found = finished(over(stored(there), selector=selector))
    same(found, alone)
    assert (alone.prefix_tokens, found.prefix_tokens) == (0, len(there))
    assert (found.compute_share < alone.compute_share) == bool(there)


def test_a_prefix_alone_is_continued() -> None:
    alone = finished(over(stored([]), count=0, recompute_ratio=1.0))
    wanted, _, _ = plain_kv(FakeStack(), prompt_ids())
    found = finished(over(stored(range(20)), count=20, chunks=False, recompute_ratio=0.0))
    torch.testing.assert_close(found.fused.keys, wanted)
    torch.testing.assert_close(found.hidden, alone.hidden)
    assert (found.prefix_tokens, found.blended, found.chunks) == (20, False, [])
    assert found.compute_share < 0.5


def test_a_prefix_that_is_gone_is_not_worth_a_pass() -> None:
    stack = FakeStack()
    refused = run(over(stored([]), stack, chunks=False).steps())
    assert not isinstance(refused, FusedPrompt)
    assert refused.chunks == ()
    assert not stack.log


def test_ranks_agree_on_blocks() -> None:
    def of(rank: int, stack: FakeStack) -> int:
        done = finished(over(stored([0, 1, 2] if rank else [0, 2]), stack))
        return done.prefix_tokens

    assert Ranks().run(of) == [2, 2]
