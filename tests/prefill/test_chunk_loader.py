"""Chunks that come layer by layer: late, in any order, lost on their way, hidden behind compute."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from cacheblend_rag import BlendConfig, TieredKVStore
from cacheblend_rag.blend.rotary import Rotation
from cacheblend_rag.blend.selectors import SELECTORS
from cacheblend_rag.kv import HostTier, Tier, codec
from cacheblend_rag.prefill import prompt_pass
from cacheblend_rag.prefill.lead_in import ChunkPlan
from cacheblend_rag.prefill.precompute import as_stored
from cacheblend_rag.prefill.prompt_pass import FusedPrompt, PromptPass
from tests.blend.fake_stack import LAYERS, FakeStack
from tests.kv.samples import SlowBytes
from tests.prefill.prompts import SPANS, Ranks, Ring, Whole, chunk_kv, placed, prompt_ids, run

NAMES = dict(zip(SPANS, placed(), strict=True))


@pytest.fixture(autouse=True)
def short_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first bytes that are read of these small chunks are not all they have."""
    monkeypatch.setattr(codec, "HEAD_BYTES", 1 << 10)


def slow_tier(names: str = "abc", **options: Any) -> SlowBytes:
    tier = SlowBytes(**options)
    tier.fill({NAMES[name].key: chunk_kv(FakeStack(), NAMES[name]) for name in names})
    return tier


class Short(FakeStack):
    """A model that has a table of angles, as vLLM's have."""

    def rotation(self, offset: int) -> Rotation:
        _ = range(1 << 20)[abs(offset)]
        return super().rotation(offset)


def test_a_position_that_the_model_does_not_have_is_damage() -> None:
    tier = slow_tier("ac")
    tier.fill({NAMES["b"].key: replace(chunk_kv(FakeStack(), NAMES["b"]), position=9_999_999_999)})
    found = over([tier], stack=Short())
    assert_same(found, expected("ac"))
    assert found[0].chunks[1].reason_code == "damaged"


@pytest.mark.parametrize("left_out", [0, 2])
def test_keys_of_4_bits_are_moved_to_where_each_token_stands(left_out: int) -> None:
    """They are stored as at position 0; of a chunk whose beginning is not used, too."""
    parts = [chunk.behind(chunk.start + left_out) for chunk in placed()]
    told = {}
    for precision in ("native", "int4"):
        stack, told[precision] = FakeStack(), Whole()
        with TieredKVStore([HostTier(None)], precision=precision) as store:
            for chunk in placed():
                plan = ChunkPlan((), (), (), chunk.key)
                made = iter([(plan, chunk_kv(stack, chunk))])
                ((_, kv),) = as_stored(stack, store, made)
                assert store.put(chunk.key, kv)
            config = BlendConfig(min_tokens=0, recompute_ratio=0.0)
            with store.fetch(chunk.key for chunk in parts) as source:
                work = PromptPass(
                    stack, prompt_ids(), parts, source, config, destination=told[precision]
                )
                run(work.steps())
    reused = torch.cat([torch.arange(part.start, part.end) for part in parts])
    for layer in range(LAYERS):
        (near, _), (keys, _) = (told[one].layers[layer] for one in ("int4", "native"))
        off = (near - keys)[..., reused, :].square().mean() / keys[..., reused, :].var()
        assert off < 0.02


def spans_of(data: bytearray, name: str) -> codec.Head:
    raw = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    head = codec.read_head(lambda a, b: raw[a:b], len(data), NAMES[name].key)
    assert head is not None
    return head


def over(
    tiers: list[Tier],
    *,
    ring: bool = False,
    stack: FakeStack | None = None,
    unpack: bool = True,
    **config: Any,
) -> tuple[FusedPrompt, Ring]:
    """What a pass over a prompt comes to, whose chunks are in these tiers."""
    told, stack = Ring() if ring else Whole(), stack or FakeStack()
    with (
        TieredKVStore(tiers) as store,
        store.fetch((chunk.key for chunk in placed()), unpack=unpack) as source,
    ):
        work = PromptPass(
            stack, prompt_ids().to(stack.device), placed(), source,
            BlendConfig(min_tokens=0, **config), destination=told,
        )  # fmt: skip
        return run(work.steps()), told


def over_nothing(**options: Any) -> tuple[FusedPrompt, Ring]:
    """What a pass comes to that goes on though no chunk is there, as when all are lost midway."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompt_pass, "refusal", lambda *_: None)
        return over([HostTier(None)], **options)


def expected(names: str = "abc", **config: Any) -> tuple[FusedPrompt, Ring]:
    host = HostTier(None)
    with TieredKVStore([host]) as store:
        for name in names:
            store.put(NAMES[name].key, chunk_kv(FakeStack(), NAMES[name]))
        return over([host], **config)


def assert_same(found: tuple[FusedPrompt, Ring], wanted: tuple[FusedPrompt, Ring]) -> None:
    (one, told), (other, other_told) = found, wanted
    assert list(told.layers) == list(range(LAYERS))
    for layer in range(LAYERS):
        for part, there in zip(told.layers[layer], other_told.layers[layer], strict=True):
            assert torch.equal(part, there)
    assert one.hidden is not None
    assert other.hidden is not None
    assert torch.equal(one.hidden, other.hidden)
    assert [c.recomputed for c in one.chunks] == [c.recomputed for c in other.chunks]
    assert (one.selector, one.ratio) == (other.selector, other.ratio)


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("ratio", [0.3])
@pytest.mark.parametrize("selector", SELECTORS)
def test_layers_that_are_read_give_what_those_in_memory_give(
    selector: str, ratio: float, ring: bool
) -> None:
    config = {"selector": selector, "recompute_ratio": ratio}
    found = over([slow_tier()], ring=ring, **config)
    assert_same(found, expected(**config))
    assert [chunk.tier for chunk in found[0].chunks] == ["bytes"] * 3


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("selector", ["hkvd", "question_mid"])
@pytest.mark.parametrize("seed", range(3))
def test_layers_may_come_late_one_by_one_and_in_any_order(
    seed: int, selector: str, ring: bool
) -> None:
    """Each read ends only when it is let go, one after the other, drawn of those under way."""
    tier, waiting, over_with = slow_tier(), list[threading.Event](), threading.Event()

    def gate(*_: Any) -> None:
        mine = threading.Event()
        waiting.append(mine)
        mine.wait(10)

    def let_go() -> None:
        draw = random.Random(seed)
        while not over_with.is_set():
            if waiting:
                waiting.pop(draw.randrange(len(waiting))).set()
            time.sleep(0.001)

    tier.gate = gate
    thread = threading.Thread(target=let_go)
    thread.start()
    try:
        found = over([tier], ring=ring, selector=selector, recompute_ratio=0.3)
    finally:
        over_with.set()
        thread.join()
    assert_same(found, expected(selector=selector, recompute_ratio=0.3))


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("selector", ["hkvd", "question_mid", "prior"])
@pytest.mark.parametrize("layer", range(LAYERS))
def test_a_chunk_that_is_damaged_midway_is_a_miss_and_the_answer_is_right(
    layer: int, selector: str, ring: bool
) -> None:
    tier, config = slow_tier(), {"selector": selector, "recompute_ratio": 0.3}
    data = tier.objects[NAMES["b"].key]
    data[spans_of(data, "b").span(layer, layer + 1)[0] + 3] ^= 1
    host = HostTier(None)
    found = over([host, tier], ring=ring, **config)
    wanted = expected("ac", **config)
    assert_same(found, wanted)
    assert [chunk.hit for chunk in found[0].chunks] == [True, False, True]
    assert [chunk.reason for chunk in found[0].chunks] == [None, "damaged", None]
    assert [chunk.tier for chunk in found[0].chunks] == ["bytes"] * 3
    assert tier.stats()["quarantined"] == 1
    # What was done in vain is told as work, too.
    assert found[0].compute_share >= wanted[0].compute_share


def test_all_chunks_may_be_lost_one_after_the_other() -> None:
    tier = slow_tier()
    for layer, name in enumerate("cab"):
        data = tier.objects[NAMES[name].key]
        data[spans_of(data, name).span(layer + 1, layer + 2)[0]] ^= 1
    found = over([tier], ring=True, recompute_ratio=0.3)
    assert_same(found, over_nothing(recompute_ratio=0.3))
    assert not found[0].blended
    assert {chunk.reason for chunk in found[0].chunks} == {"damaged"}


@pytest.mark.parametrize("rank", [0, 1])
def test_what_one_rank_loses_midway_both_do_without(rank: int) -> None:
    tiers = [slow_tier(), slow_tier()]
    data = tiers[rank].objects[NAMES["b"].key]
    data[spans_of(data, "b").span(2, 3)[0]] ^= 1
    delay = 0.002
    tiers[1 - rank].gate = lambda *_: time.sleep(delay)

    def of(rank: int, stack: FakeStack) -> tuple[FusedPrompt, Ring]:
        return over([tiers[rank]], stack=stack, ring=True, recompute_ratio=0.3)

    both = Ranks().run(of)
    for found in both:
        assert_same(found, expected("ac", recompute_ratio=0.3))
    reasons = [[chunk.reason for chunk in found[0].chunks] for found in both]
    assert reasons[rank] == [None, "damaged", None]
    assert reasons[1 - rank] == [None, "not stored", None]
