"""The pass over a prompt whose first tokens have exact KV, over the fake stack."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch

from cacheblend_rag import BlendConfig, TieredKVStore
from cacheblend_rag.blend import FusedKV
from cacheblend_rag.kv.timings import Speeds
from cacheblend_rag.prefill import prefix, prompt_pass
from cacheblend_rag.prefill.controller import Decision, Rates, StoredPart
from cacheblend_rag.prefill.prefix import PrefixKeys, block_kv
from cacheblend_rag.prefill.prompt_pass import FusedPrompt, PromptPass
from tests.blend.fake_stack import FakeStack, plain_kv
from tests.prefill.prompts import SPANS, TOKENS, Ranks, filled, finished, placed, prompt_ids, run

BEFORE = SPANS["a"][0]
"""Tokens before the first chunk: as many blocks, of one token each."""
KEYS = PrefixKeys.of({"model": "fake"}, "default")


@pytest.fixture(autouse=True)
def _blocks_of_one_token(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (prefix, prompt_pass):
        monkeypatch.setattr(module, "BLOCK_TOKENS", 1)


def stored(blocks: Iterable[int], chunks: str = "abc") -> TieredKVStore:
    """Return a store with some chunks, and some blocks of the prompt's own KV."""
    stack, store = FakeStack(), filled(placed(names=chunks))
    fused = FusedKV(stack.geometry, TOKENS)
    fused.keys, fused.values, _ = plain_kv(stack, prompt_ids())
    keys = KEYS.blocks(prompt_ids().tolist())
    for block in blocks:
        store.put(keys[block], block_kv(fused, block))
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
    placed_chunks = placed() if chunks else []
    keys = KEYS.blocks(prompt_ids().tolist())[:count]
    source = store.fetch([*keys, *(chunk.key for chunk in placed_chunks)])
    return PromptPass(
        stack or FakeStack(),
        prompt_ids(),
        placed_chunks,
        source,
        BlendConfig(**{"min_tokens": 0, "recompute_ratio": 0.3, **config}),
        controller=controller,
        prefix_blocks=count,
    )


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


def test_blocks_do_not_count_as_reusable_chunks() -> None:
    refused = run(over(stored(range(BEFORE)), min_tokens=22).steps())
    assert not isinstance(refused, FusedPrompt)
    assert refused.reason == "21 reusable tokens are fewer than min_tokens=22"
    assert [chunk.reason for chunk in refused.chunks] == ["too short"] * 3


def test_ranks_agree_on_blocks() -> None:
    def of(rank: int, stack: FakeStack) -> int:
        done = finished(over(stored([0, 1, 2] if rank else [0, 2]), stack))
        return done.prefix_tokens

    assert Ranks().run(of) == [2, 2]


class Keeps:
    """A controller that loads parts which begin at some tokens."""

    def __init__(self, *starts: int) -> None:
        self.starts, self.parts = starts, list[StoredPart]()
        self.rates, self.speeds = Rates(), Speeds()

    def decide(
        self, tokens: int, parts: list[StoredPart], config: BlendConfig, *, held: int
    ) -> Decision:
        assert held == 0
        self.parts = parts
        return Decision(tuple(part for part in parts if part.start in self.starts), config)


def test_measured_speeds_decide_about_blocks_too() -> None:
    controller = Keeps(1, 2, *(start for start, _ in SPANS.values()))
    found = finished(over(stored(range(BEFORE)), controller=controller))
    assert found.prefix_tokens == 2
    same(found, finished(over(stored([]), count=0)))
    told = [(part.start, part.end, part.protected) for part in controller.parts]
    assert told[:BEFORE] == [(0, 1, 1), (1, 2, 1), (2, 3, 1)]
    assert told[BEFORE:] == [(*span, 0) for span in SPANS.values()]


@pytest.mark.parametrize("chunks", [True, False])
def test_without_a_chunk_to_load_nothing_is_blended(chunks: bool) -> None:
    """A prefix alone is a pass of its own, which is decided about by itself."""
    blocks = range(BEFORE)
    refused = run(over(stored(blocks), controller=Keeps(*blocks)).steps())
    assert not isinstance(refused, FusedPrompt)
    assert [chunk.reason for chunk in refused.chunks] == ["slow"] * 3
    none = run(over(stored(blocks), chunks=chunks, controller=Keeps()).steps())
    assert not isinstance(none, FusedPrompt)
    alone = run(over(stored(blocks), chunks=False, controller=Keeps(*blocks)).steps())
    assert alone.prefix_tokens == BEFORE
