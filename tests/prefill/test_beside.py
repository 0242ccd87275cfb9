"""Passes whose KV is copied beside them: the same as ones that copy plainly, bit for bit.

On a fake device that copies as late as it may, and on a GPU if there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from cacheblend_rag import TieredKVStore
from cacheblend_rag.blend.copy_stream import PinnedBuffers, pinned_buffers_of
from cacheblend_rag.kv import HostTier, StoredChunk, Tier, codec
from cacheblend_rag.kv.chunk_kv import ChunkKV
from cacheblend_rag.prefill.prompt_pass import FusedPrompt
from tests.blend.fake_copy_stream import FakeCopyStream, use
from tests.blend.fake_stack import LAYERS, FakeStack
from tests.kv.samples import SlowBytes
from tests.prefill import test_precompute as documents
from tests.prefill.prompts import Ring, chunk_kv, give_up
from tests.prefill.test_chunk_loader import NAMES, assert_same, over, slow_tier, spans_of

CPU = torch.device("cpu")
BUFFER_BYTES = 700
"""Of which a layer of these chunks takes about four."""
GPU = pytest.param(
    "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
)
Result = tuple[FusedPrompt, Ring]


@dataclass
class Beside:
    """Has passes copy beside their work, or plainly."""

    copy_stream: FakeCopyStream | None
    buffers: PinnedBuffers
    monkeypatch: pytest.MonkeyPatch

    @property
    def device(self) -> torch.device:
        return CPU if self.copy_stream else torch.device("cuda", 0)

    def stack(self, **options: Any) -> FakeStack:
        return FakeStack(device=self.device, **options)

    def plainly(self, call: Callable[[], Any]) -> Any:
        use(self.monkeypatch, None)
        try:
            return call()
        finally:
            use(self.monkeypatch, self.buffers)

    def check(self) -> None:
        """What should be so at the end of every test."""
        self.buffers.stager.submit(lambda: None).result()  # after whatever it has to do
        if self.copy_stream is None:
            torch.cuda.synchronize()
        else:
            self.copy_stream.finish()
            assert self.copy_stream.errors == []
            assert all(name.startswith("kv-cut") for name in self.copy_stream.waited_in)
        found = [self.buffers.take() for _ in range(2)]
        assert len({id(buffer) for buffer in found if buffer is not None}) == 2
        assert self.buffers.take() is None


@pytest.fixture(params=["fake", GPU])
def beside(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Beside]:
    monkeypatch.setattr(codec, "HEAD_BYTES", 1 << 10)
    if request.param == "fake":
        copy_stream = FakeCopyStream(patience=1)
        copy_stream.watch(monkeypatch)
        found = Beside(copy_stream, PinnedBuffers(copy_stream, 2, BUFFER_BYTES), monkeypatch)
    else:
        real = pinned_buffers_of(torch.device("cuda", 0))
        assert real is not None
        found = Beside(None, PinnedBuffers(real.copy_stream, 2, BUFFER_BYTES), monkeypatch)
    use(monkeypatch, found.buffers)
    yield found
    found.check()


def host_tier(names: str = "abc") -> HostTier:
    host = HostTier(None)
    for name in names:
        host.put(NAMES[name].key, StoredChunk(chunk_kv(FakeStack(), NAMES[name]), 0.0))
    return host


def both(beside: Beside, tiers: Callable[[], list[Tier]], **options: Any) -> tuple[Result, Result]:
    """What a pass comes to with the copy stream and without it."""
    plain = beside.plainly(lambda: over([host_tier()], stack=beside.stack(), **options))
    return over(tiers(), stack=beside.stack(), **options), plain


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("make_tier", [host_tier, slow_tier])
@pytest.mark.parametrize("selector", ["none", "prior", "hkvd", "question_mid", "all"])
def test_a_pass_is_the_same(
    beside: Beside, selector: str, make_tier: Callable[[], Tier], ring: bool
) -> None:
    options = {"selector": selector, "recompute_ratio": 0.3, "ring": ring}
    found, plain = both(beside, lambda: [make_tier()], **options)
    assert found[0].blended
    assert_same(found, plain)


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("selector", ["question_mid", "prior"])
@pytest.mark.parametrize("layer", range(1, LAYERS))
def test_a_chunk_that_is_lost_midway_leaves_nothing_behind(
    beside: Beside, layer: int, selector: str, ring: bool
) -> None:
    """What was on its way then is not laid over what the pass that starts anew computes."""
    tier, options = slow_tier(), {"selector": selector, "recompute_ratio": 0.3, "ring": ring}
    data = tier.objects[NAMES["b"].key]
    data[spans_of(data, "b").span(layer, layer + 1)[0] + 3] ^= 1
    wanted = beside.plainly(lambda: over([host_tier("ac")], stack=beside.stack(), **options))
    found = over([tier], stack=beside.stack(), **options)
    assert_same(found, wanted)
    assert [chunk.reason for chunk in found[0].chunks] == [None, "damaged", None]


@pytest.mark.parametrize("steps", [2, 4, 5, 7, 10])
@pytest.mark.parametrize("ring", [False, True])
def test_a_pass_that_is_given_up_gives_everything_back(
    beside: Beside, ring: bool, steps: int
) -> None:
    with TieredKVStore([host_tier()]) as store:
        give_up(store, beside.stack(), ring=ring, steps=steps)
    # The device is still at what was asked, while the next pass begins.
    found = over([host_tier()], stack=beside.stack(), ring=ring, recompute_ratio=0.3)
    wanted = beside.plainly(
        lambda: over([host_tier()], stack=beside.stack(), ring=ring, recompute_ratio=0.3)
    )
    assert_same(found, wanted)


# Index time


def same(one: ChunkKV, other: ChunkKV) -> bool:
    assert one.prior is not None
    assert other.prior is not None
    pairs = ((one.keys, other.keys), (one.values, other.values), (one.prior, other.prior))
    assert not any(tensor.is_cuda for tensor, _ in pairs)
    return all(torch.equal(tensor, wanted.cpu()) for tensor, wanted in pairs)


@pytest.mark.parametrize("in_document", [True, False])
@pytest.mark.parametrize("stored", [(), (0,), (1,), (0, 2), (1, 2)])
def test_documents_are_computed_alike(
    beside: Beside, stored: tuple[int, ...], in_document: bool
) -> None:
    def found() -> dict[Any, Any]:
        with TieredKVStore.open() as store:
            for index in stored:
                kv = documents.wanted(documents.DOCUMENT[index])
                store.put(documents.DOCUMENT[index].key, kv)
            return documents.compute(
                documents.DOCUMENT, store, in_document=in_document, stack=beside.stack()
            )

    wanted = beside.plainly(found)
    computed = found()
    assert list(computed) == list(wanted)
    assert len(computed) == len(documents.DOCUMENT) - len(stored)
    for key, (_, kv) in computed.items():
        assert same(kv, wanted[key][1])


def test_a_document_of_which_stored_kv_is_lost_midway(beside: Beside) -> None:
    tier = SlowBytes()
    first = documents.DOCUMENT[0]
    tier.fill({first.key: documents.wanted(first)})
    data = tier.objects[first.key]
    head = codec.read_head(
        lambda a, b: torch.frombuffer(bytearray(data), dtype=torch.uint8)[a:b],
        len(data), first.key,
    )  # fmt: skip
    assert head is not None
    data[head.span(2, 3)[0]] ^= 1
    with TieredKVStore([tier]) as store:
        computed = documents.compute(documents.DOCUMENT, store, stack=beside.stack())
    assert list(computed) == [chunk.key for chunk in [*documents.DOCUMENT[1:], first]]
    for chunk, kv in computed.values():
        documents.check(chunk, kv)
