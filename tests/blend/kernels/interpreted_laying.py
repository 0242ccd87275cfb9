"""Chunks in memory are laid as each layer alone would be, in Triton's interpreter.

test_placement.py runs it. The fake device copies as late as it
may, and reads what it finds then.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from cacheblend_rag.blend import FusedKV, RingKV
from cacheblend_rag.blend.copy_stream import TABLE_BYTES, PinnedBuffers
from cacheblend_rag.blend.kernels import placement
from cacheblend_rag.blend.layer_part import LayerPart, WholePart
from cacheblend_rag.blend.rotary import Rotation
from cacheblend_rag.blend.stack import Geometry
from cacheblend_rag.blend.transfer import Laying, Upload
from cacheblend_rag.kv import HostTier, StoredChunk, codec
from cacheblend_rag.kv.chunk_kv import ChunkKV
from tests.blend.fake_copy_stream import FakeCopyStream, use
from tests.blend.fake_stack import FakeStack
from tests.prefill.prompts import chunk_kv
from tests.prefill.test_chunk_loader import NAMES, assert_same, over

DEPTH, HEADS, WIDTH = 4, 2, 16
CPU = torch.device("cpu")
SPANS = ((1, 7, 5), (9, 3, None), (12, 11, -4), (24, 5, 2))
"""Where runs of chunks start, their tokens, and how far they are moved."""
TOKENS = 30


class Interpreted:
    """The kernel, of which the fake device sees what it is given, not how it is interpreted."""

    def __init__(self, kernel: Any, copy_stream: FakeCopyStream) -> None:
        self._kernel, self._copy_stream = kernel, copy_stream

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*given: Any) -> None:
            with _disable_current_modes():
                self._kernel[grid](*given)
            for tensor in given:
                if isinstance(tensor, Tensor):
                    self._copy_stream.saw(tensor, set())

        return launch


def interpret(monkeypatch: pytest.MonkeyPatch, copy_stream: FakeCopyStream) -> None:
    kernel = Interpreted(placement.place_kernel, copy_stream)
    monkeypatch.setattr(placement, "place_kernel", kernel)


def turn_of(by: int | None) -> Rotation | None:
    """Another rotation in every layer."""
    if by is None:
        return None
    angles = by * torch.arange(1, DEPTH + 1)[:, None] * 0.7 ** torch.arange(WIDTH // 2)
    return Rotation(angles.cos(), angles.sin())


def stored(size: int, form: Any, place: Callable[[Tensor], Tensor], seed: int = 0) -> ChunkKV:
    draw = torch.Generator().manual_seed(seed)
    kv = ChunkKV(torch.randn(DEPTH, 2, HEADS, size, WIDTH, generator=draw).half(), 0)
    return kv.packed(form).mapped(lambda tensor: place(tensor.clone()))


def wholes_of(copy_stream: FakeCopyStream, form: str, *, on_device: bool) -> list[WholePart]:
    parts = []
    for number, (start, tokens, by) in enumerate(SPANS):
        skip, beyond = number % 3, number % 2
        own = ("native", "fp8")[number % 2] if form == "mixed" else form
        is_there = on_device and number % 2 == 0
        place = copy_stream.put_here if is_there else copy_stream.pin
        kv = stored(skip + tokens + beyond, own, place, number)
        first = kv.layer(0).cut(skip, skip + tokens)
        parts.append(WholePart(kv, LayerPart(start, first, turn_of(by))))
    return parts


def part_of(whole: WholePart, layer: int, skip: int) -> LayerPart:
    of = whole.first
    own = whole.kv.layer(layer).cut(skip, skip + of.kv.tokens)
    return LayerPart(of.start, own, None if of.turn is None else of.turn.of(layer))


def buffer(*, ring: bool) -> FusedKV:
    shape = Geometry(DEPTH, HEADS, HEADS, WIDTH, torch.half, CPU)
    fused = RingKV(shape, TOKENS) if ring else FusedKV(shape, TOKENS)
    fused.keys.fill_(torch.nan)
    fused.values.fill_(torch.nan)
    return fused


def layer_of(fused: FusedKV, layer: int) -> list[Tensor]:
    return [part.clone().view(torch.int16) for part in fused.layer(layer)]


@pytest.fixture
def copy_stream(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCopyStream]:
    fake = FakeCopyStream(patience=None)
    fake.watch(monkeypatch)
    interpret(monkeypatch, fake)
    yield fake
    fake.finish()
    assert fake.errors == []
    assert fake.waited_in == []


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize(("form", "on_device"), [("native", False), ("fp8", True), ("mixed", True)])
def test_layers_are_laid_as_each_alone_bit_for_bit(
    copy_stream: FakeCopyStream, form: str, on_device: bool, ring: bool
) -> None:
    """Each is queued while the one before is at work."""
    buffers = PinnedBuffers(copy_stream, 2, 4096, table_bytes=TABLE_BYTES)
    wholes = wholes_of(copy_stream, form, on_device=on_device)
    wanted = buffer(ring=ring)
    alone = []
    for layer in range(DEPTH):
        parts = [part_of(whole, layer, n % 3) for n, whole in enumerate(wholes)]
        upload = Upload(buffers, wanted, layer, parts, copy_stream.worked())
        assert upload.go_on()
        upload.arrive()
        alone.append(layer_of(wanted, layer))
    fused = buffer(ring=ring)
    laying = Laying.of(buffers, fused, wholes)
    assert laying is not None
    event = laying.queue(0)
    for layer in range(DEPTH):
        copy_stream.hold_work(event)
        if layer + 1 < DEPTH:
            event = laying.queue(layer + 1)
        found = layer_of(fused, layer)
        assert all(torch.equal(*pair) for pair in zip(found, alone[layer], strict=True))


@pytest.mark.parametrize("how", ["ordinary", "strides", "int4"])
def test_chunks_that_the_kernel_cannot_read_are_not_planned(
    copy_stream: FakeCopyStream, how: str
) -> None:
    buffers = PinnedBuffers(copy_stream, 2, 4096, table_bytes=TABLE_BYTES)
    wholes = wholes_of(copy_stream, "native", on_device=False)
    assert Laying.of(buffers, buffer(ring=False), wholes) is not None
    form = "int4" if how == "int4" else "native"
    kv = stored(4, form, torch.Tensor.clone if how == "ordinary" else copy_stream.pin)
    if how == "strides":
        kv = kv.mapped(lambda tensor: tensor[..., ::2, :])
    wholes.append(WholePart(kv, LayerPart(0, kv.layer(0), None)))
    assert Laying.of(buffers, buffer(ring=False), wholes) is None


def test_chunks_of_4_bits_are_placed_without_the_kernel(copy_stream: FakeCopyStream) -> None:
    buffers = PinnedBuffers(copy_stream, 2, 4096, table_bytes=TABLE_BYTES)
    turn = turn_of(1)
    assert turn is not None
    kv = stored(7, "int4", copy_stream.pin).layer(0)
    part = LayerPart(1, kv, turn.of(0).per_token(1))
    fused, plain = buffer(ring=False), buffer(ring=False)
    upload = Upload(buffers, fused, 0, [part], copy_stream.worked())
    while not upload.go_on():
        pass
    upload.arrive()
    copy_stream.worked()
    plain.place(0, 1, kv.keys[0], kv.values[0], part.turn)
    pairs = zip(layer_of(fused, 0), layer_of(plain, 0), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


def test_chunks_are_held_until_they_are_read_and_no_longer(copy_stream: FakeCopyStream) -> None:
    buffers = PinnedBuffers(copy_stream, 2, 4096, table_bytes=TABLE_BYTES)
    wholes = wholes_of(copy_stream, "mixed", on_device=True)
    kept = [weakref.ref(tensor) for whole in wholes for tensor in tensors_of(whole.kv)]
    fused = buffer(ring=False)
    laying = Laying.of(buffers, fused, wholes)
    assert laying is not None
    before = laying.queue(0)
    copy_stream.hold_work(before)
    last = laying.queue(1)
    del wholes, laying
    gc.collect()
    buffers.release()
    assert all(one() is not None for one in kept), "layer 1 is still to be read"
    copy_stream.hold_work(last)
    assert not fused.layer(1)[0][:, :, 1:8].isnan().any()
    gc.collect()
    buffers.release()
    gc.collect()
    assert all(one() is None for one in kept)


def tensors_of(kv: ChunkKV) -> list[Tensor]:
    found: list[Tensor] = []
    kv.mapped(lambda tensor: found.append(tensor) or tensor)  # type: ignore[func-returns-value]
    return found


# Passes


class Readable(FakeCopyStream):
    """A device that reads all of the host's memory, as it does page-locked memory."""

    def is_pinned(self, tensor: Tensor) -> bool:
        return True


@dataclass
class Passes:
    """Has passes lay chunks by a plan, or layer by layer. planned: how many did so."""

    monkeypatch: pytest.MonkeyPatch
    planned: int = 0

    def layer_by_layer(self, call: Callable[[], Any]) -> Any:
        with self.monkeypatch.context() as patch:
            patch.setattr(Laying, "is_possible", lambda _: False)
            return call()


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Passes]:
    monkeypatch.setattr(codec, "HEAD_BYTES", 1 << 10)
    stream, found, own = Readable(patience=1), Passes(monkeypatch), Laying.__init__
    stream.watch(monkeypatch)
    interpret(monkeypatch, stream)
    buffers = PinnedBuffers(stream, 2, 4096, table_bytes=TABLE_BYTES)
    use(monkeypatch, buffers)

    def noted(laying: Laying, *given: Any, **named: Any) -> None:
        found.planned += 1
        own(laying, *given, **named)

    monkeypatch.setattr(Laying, "__init__", noted)
    yield found
    stream.finish()
    assert stream.errors == []
    assert stream.waited_in == []
    buffers.release()
    assert not buffers._held


def host_tier(names: str = "abc", form: Any = "native") -> HostTier:
    host = HostTier(None)
    for name in names:
        kv = chunk_kv(FakeStack(), NAMES[name])
        host.put(NAMES[name].key, StoredChunk(kv.packed() if form == "fp8" else kv, 0.0))
    return host


@pytest.mark.parametrize(
    ("selector", "form", "ring"),
    [
        ("none", "native", True),
        ("hkvd", "fp8", True),
        ("question_mid", "native", False),
    ],
)
def test_a_pass_is_the_same(passes: Passes, selector: str, form: str, ring: bool) -> None:
    options = {"selector": selector, "recompute_ratio": 0.3, "ring": ring, "unpack": False}
    wanted = passes.layer_by_layer(lambda: over([host_tier(form=form)], **options))
    assert passes.planned == 0
    found = over([host_tier(form=form)], **options)
    assert found[0].blended
    assert passes.planned == 1
    assert_same(found, wanted)
    assert set(found[0].load_by_tier) == {"host"}
    assert found[0].seconds["lay_in"] > 0
