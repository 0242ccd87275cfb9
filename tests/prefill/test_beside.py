"""Passes whose KV is copied beside them: the same as ones that copy plainly, bit for bit.

On a fake device that copies as late as it may, and on a GPU if there is one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from cacheblend_rag import TieredKVStore
from cacheblend_rag.blend.copy_stream import PinnedBuffers, pinned_buffers_of
from cacheblend_rag.blend.transfer import Upload
from cacheblend_rag.kv import DeviceTier, DiskTier, HostTier, StoredChunk, Tier, codec, read_memory
from cacheblend_rag.kv.chunk_kv import ChunkKV
from cacheblend_rag.kv.read_memory import ReadMemory
from cacheblend_rag.kv.tiers import disk as disk_module
from cacheblend_rag.kv.tiers.bytes import BytesTier
from cacheblend_rag.prefill import chunk_loader
from cacheblend_rag.prefill.prompt_pass import FusedPrompt
from tests.blend.fake_copy_stream import FakeCopyStream, use
from tests.blend.fake_stack import LAYERS, Event, FakeStack
from tests.kv.locked import Locked
from tests.kv.samples import SlowBytes
from tests.prefill import test_precompute as documents
from tests.prefill.prompts import Ring, chunk_kv, give_up, placed
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
@pytest.mark.parametrize("tier", ["host", "bytes", "device"])
def test_a_pass_over_packed_chunks_is_that_over_their_numbers(
    beside: Beside, tier: str, ring: bool
) -> None:
    """Unpacked by threads of the store's, by the pass itself, or by the device."""
    kvs = {c.key: chunk_kv(FakeStack(), c).packed() for c in placed()}
    options = {"selector": "hkvd", "recompute_ratio": 0.3, "ring": ring}

    def filled(kind: str, *, native: bool = False) -> Tier:
        if kind == "bytes":
            slow = SlowBytes()
            slow.fill(kvs)
            return slow
        made = HostTier(None) if kind == "host" else DeviceTier(beside.device, None)
        for key, kv in kvs.items():
            if kind == "device" and beside.copy_stream is not None:
                kv.mapped(beside.copy_stream.put_here)
            kept = kv.unpacked() if native else kv
            assert made.put(key, StoredChunk(kept, 0.0))
        return made

    wanted = beside.plainly(
        lambda: over([filled("host", native=True)], stack=beside.stack(), **options)
    )
    assert wanted[0].blended
    for unpack in (True, False):
        found = over([filled(tier)], stack=beside.stack(), unpack=unpack, **options)
        assert_same(found, wanted)
        if beside.copy_stream is not None:
            there = beside.plainly(
                lambda unpack=unpack: over(
                    [filled(tier)], stack=beside.stack(), unpack=unpack, **options
                )
            )
            assert_same(there, wanted)


def test_what_is_read_into_page_locked_memory_is_not_copied_on_the_host(
    beside: Beside, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The device copies it from where it was read to, and until then it is not read over."""
    if beside.copy_stream is None:
        pytest.skip("layers of these chunks are too small to be read by themselves")
    locked, stream, staged = Locked(), beside.copy_stream, list[Any]()
    memory = ReadMemory(locked.memory)
    beside.buffers = PinnedBuffers(stream, 2, 1 << 16)  # parts of a layer are no run of bytes
    use(monkeypatch, beside.buffers)
    monkeypatch.setattr(read_memory, "LEAST_BYTES", 1)
    monkeypatch.setattr(disk_module, "OF_PROCESS", memory)
    monkeypatch.setattr(BytesTier, "whole_bytes", 0)
    monkeypatch.setattr(BytesTier, "range_bytes", 0)
    own = stream.is_pinned
    monkeypatch.setattr(stream, "is_pinned", lambda tensor: own(tensor) or locked.has(tensor))
    send = Upload._send

    def noted(upload: Upload, load: Any) -> None:
        staged.extend(load.sources)
        send(upload, load)

    monkeypatch.setattr(Upload, "_send", noted)

    def disk() -> list[Tier]:
        tier = DiskTier(tmp_path)
        for name in "abc":
            tier.put(NAMES[name].key, StoredChunk(chunk_kv(FakeStack(), NAMES[name]), 0.0))
        return [tier]

    for ring in (False, True):
        assert_same(*both(beside, disk, ring=ring, recompute_ratio=0.3))
    assert locked.pages
    assert staged == []


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


def test_a_layer_is_on_its_way_while_the_one_before_is_computed(
    beside: Beside, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = beside.stack()

    class Noted(Upload):
        def __init__(self, buffers: PinnedBuffers, fused: Any, layer: int, *rest: Any) -> None:
            stack.log.append(Event("upload", layer, ()))
            super().__init__(buffers, fused, layer, *rest)

    monkeypatch.setattr(chunk_loader, "Upload", Noted)
    over([host_tier()], stack=stack, ring=True, selector="none")
    steps = [event[:2] for event in stack.log if event[0] in {"upload", "run"}]
    runs = [("run", layer) for layer in range(LAYERS) if ("run", layer) in steps]
    assert [step for step in steps if step[0] == "upload"] == [("upload", n) for n in range(LAYERS)]
    assert len(runs) >= LAYERS - 1
    for _, layer in runs[: LAYERS - 1]:
        assert steps.index(("upload", layer + 1)) < steps.index(("run", layer))


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


def test_chunks_are_computed_one_by_one_alike(beside: Beside) -> None:
    def found() -> dict[Any, Any]:
        with TieredKVStore.open() as store:
            return documents.made(documents.alone_on(beside.stack(), store)(documents.DOCUMENT))

    wanted, computed = beside.plainly(found), found()
    for key, (_, kv) in computed.items():
        assert torch.equal(kv.keys, wanted[key][1].keys)
        assert torch.equal(kv.values, wanted[key][1].values)


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
