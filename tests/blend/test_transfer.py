"""KV that is copied beside a device's work: on a fake that is late, and on a GPU if there is one.

What a fake cannot show is that CUDA does as it is told; what a GPU seldom shows is what goes wrong
only when a copy is late.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from cacheblend_rag.blend import FusedKV, RingKV
from cacheblend_rag.blend.copy_stream import CopyStream, PinnedBuffers, pinned_buffers_of
from cacheblend_rag.blend.layer_part import LayerPart
from cacheblend_rag.blend.rotary import Rotation
from cacheblend_rag.blend.stack import Geometry
from cacheblend_rag.blend.transfer import Download, Upload
from cacheblend_rag.kv import ChunkKV
from tests.blend.fake_copy_stream import AtOnce, FakeCopyStream
from tests.blend.fake_stack import FREQUENCIES, HEAD_DIM, KV_HEADS, LAYERS

ROW_BYTES = 2 * KV_HEADS * HEAD_DIM * 4
TOKENS = 30
CHUNKS = ((1, 7, 5), (9, 3, None), (12, 11, -4))
"""Where chunks start, their tokens, and how far they are moved."""
GPU = pytest.param(
    "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
)


@pytest.fixture(params=["fake", GPU])
def copy_stream(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    if request.param == "cuda":
        yield CopyStream(torch.device("cuda", 0))
        torch.cuda.synchronize()
        return
    fake = FakeCopyStream()
    fake.watch(monkeypatch)
    yield fake
    fake.finish()
    assert fake.errors == []
    assert all(name.startswith("kv-cut") for name in fake.waited_in), "others never wait"


def geometry(copy_stream: Any) -> Geometry:
    device = torch.device("cpu" if isinstance(copy_stream, FakeCopyStream) else "cuda")
    return Geometry(LAYERS, KV_HEADS, KV_HEADS, HEAD_DIM, torch.float32, device)


def turn_of(by: int | None, device: torch.device) -> Rotation | None:
    if by is None:
        return None
    angles = (by * FREQUENCIES)[None].to(device)
    return Rotation(angles.cos(), angles.sin())


def parts_of(layer: int, device: torch.device, form: Any = "native") -> list[LayerPart]:
    """Each token of 4-bit parts is moved by its own position."""
    draw = torch.Generator().manual_seed(layer)
    parts = []
    for start, tokens, by in CHUNKS:
        kv = formed(torch.randn(2, KV_HEADS, tokens, HEAD_DIM, generator=draw), form)
        turn = turn_of(1 if form == "int4" else by, device)
        if turn is not None and form == "int4":
            turn = turn.per_token(start)
        parts.append(LayerPart(start, kv, turn))
    return parts


def formed(kv: Tensor, form: Any) -> ChunkKV:
    own = ChunkKV(kv[None], 0)
    return own.packed(form)


def buffer(kind: str, shape: Geometry) -> FusedKV:
    fused = FusedKV(shape, TOKENS) if kind == "fused" else RingKV(shape, TOKENS)
    fused.keys.fill_(torch.nan)
    fused.values.fill_(torch.nan)
    return fused


def sent(upload: Upload) -> None:
    """Ask until all is asked for; the host does nothing but come back."""
    end = time.monotonic() + 20
    while not upload.go_on():
        assert time.monotonic() < end
        time.sleep(0.001)


def laid_plainly(kind: str, copy_stream: Any, form: Any = "native") -> list[tuple[Tensor, Tensor]]:
    fused, found = buffer(kind, geometry(copy_stream)), []
    for layer in range(LAYERS):
        for part in parts_of(layer, fused.keys.device, form):
            fused.place(layer, part.start, part.kv.keys[0], part.kv.values[0], part.turn)
        found.append(tuple(kv.clone() for kv in fused.layer(layer)))
    return found


@pytest.mark.parametrize(
    ("form", "most", "rows"),
    [
        *((form, *sizes) for form in ("native", "fp8") for sizes in ((1, 1), (2, 4), (3, 100))),
        ("int4", 1, 9),
    ],
)
@pytest.mark.parametrize("kind", ["fused", "ring"])
def test_what_is_laid_beside_the_work_is_what_is_laid_plainly(
    copy_stream: Any, form: str, kind: str, most: int, rows: int
) -> None:
    """Each layer is asked for while the one before it is at work, through a few small buffers."""
    buffers, fused = (
        PinnedBuffers(copy_stream, most, rows * ROW_BYTES),
        buffer(kind, geometry(copy_stream)),
    )
    found = []
    free = copy_stream.worked()
    for layer in range(LAYERS):
        upload = Upload(buffers, fused, layer, parts_of(layer, fused.keys.device, form), free)
        if layer:
            found.append(tuple(kv.clone() for kv in fused.layer(layer - 1)))
        sent(upload)
        upload.arrive()
        free = copy_stream.worked()
    found.append(tuple(kv.clone() for kv in fused.layer(LAYERS - 1)))
    for one, other in zip(found, laid_plainly(kind, copy_stream, form), strict=True):
        for part, wanted in zip(one, other, strict=True):
            assert torch.equal(part.nan_to_num(7.0), wanted.nan_to_num(7.0))


def assert_laid(fused: Any, copy_stream: Any) -> None:
    for one, other in zip(fused.layer(0), laid_plainly("fused", copy_stream)[0], strict=True):
        assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))


def test_pinned_memory_is_copied_from_where_it_lies_and_held_until_then() -> None:
    copy_stream = FakeCopyStream()
    buffers, fused = (
        PinnedBuffers(copy_stream, 2, 40 * ROW_BYTES),
        buffer("fused", geometry(copy_stream)),
    )
    upload = Upload(
        buffers, fused, 0,
        (LayerPart(p.start, p.kv.mapped(lambda kv: copy_stream.pin(kv.clone())), p.turn)
         for p in parts_of(0, fused.keys.device)),
        copy_stream.worked(),
    )  # fmt: skip
    assert upload.go_on()
    staged = copy_stream.made[0]
    upload.arrive()
    assert copy_stream.errors == []
    assert torch.equal(staged, torch.full_like(staged, 0xFF)), "nothing went through the buffer"
    assert_laid(fused, copy_stream)


@pytest.mark.parametrize(("most", "rows"), [(1, 1), (2, 4), (3, 100)])
def test_what_is_fetched_is_what_was_there_though_a_ring_is_written_over(
    copy_stream: Any, most: int, rows: int
) -> None:
    shape = geometry(copy_stream)
    buffers, ring = PinnedBuffers(copy_stream, most, rows * ROW_BYTES), buffer("ring", shape)
    draw = torch.Generator().manual_seed(1)
    wanted = torch.randn(LAYERS, 2, KV_HEADS, TOKENS, HEAD_DIM, generator=draw)
    into, download = torch.full_like(wanted[..., 3:20, :], torch.nan), Download(buffers)
    for layer in range(LAYERS):
        while not download.go_on():
            time.sleep(0.001)
        for part, whole in zip(ring.of_layer(layer), wanted[layer], strict=True):
            part.copy_(whole)
        parts = (whole[:, 3:20] for whole in ring.of_layer(layer))
        download.add(zip(into[layer], parts, strict=True))
    end = time.monotonic() + 20
    while not download.is_done():
        assert time.monotonic() < end
        time.sleep(0.001)
    assert torch.equal(into, wanted[..., 3:20, :])
    given_back = [buffers.take() for _ in range(most)]
    assert len({id(buffer) for buffer in given_back if buffer is not None}) == most
    assert buffers.take() is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("form", ["native", "fp8"])
def test_nothing_on_the_way_synchronizes_a_gpu(form: str) -> None:
    device = torch.device("cuda", 0)
    buffers = pinned_buffers_of(device)
    assert buffers is pinned_buffers_of(torch.device("cuda")) is not None
    shape = Geometry(2, 8, 8, 128, torch.bfloat16, device)
    fused = RingKV(shape, 2048)
    kv = torch.randn(2, 8, 2048, 128).bfloat16()
    turn = turn_of(3, device)
    for _ in range(2):  # memory is made the first time
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            parts = [LayerPart(0, formed(kv, form), turn)]
            upload = Upload(buffers, fused, 0, parts, buffers.copy_stream.worked())
            while not upload.go_on():
                time.sleep(0.001)
            upload.arrive()
            download, into = Download(buffers), torch.empty_like(kv)
            download.add(zip(into, fused.of_layer(0), strict=True))
            while not download.is_done():
                time.sleep(0.001)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(into[1], formed(kv, form).values[0])
    assert not torch.equal(into[0], kv[0])


@pytest.mark.parametrize("what", ["pinned", "scratch", "run", "copy"])
@pytest.mark.parametrize("way", ["up", "down"])
def test_no_stage_is_lost_where_there_is_no_memory(
    way: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two buffers are all there are: a third failure would find none otherwise."""
    copy_stream = FakeCopyStream()
    buffers, fused = (
        PinnedBuffers(copy_stream, 2, 40 * ROW_BYTES),
        buffer("fused", geometry(copy_stream)),
    )

    buffers.stager = AtOnce()

    def move() -> bool:
        if way == "up":
            return Upload(
                buffers, fused, 0, parts_of(0, fused.keys.device), copy_stream.worked()
            ).go_on()
        download = Download(buffers)
        download.add([(torch.empty(KV_HEADS, TOKENS, HEAD_DIM), fused.of_layer(0)[0])])
        return download.go_on()

    def refused(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    for _ in range(3):
        with monkeypatch.context() as patch:
            patch.setattr(copy_stream, what, refused)
            if what in {"pinned", "scratch"}:
                assert buffers.release() >= 0
            with pytest.raises(torch.OutOfMemoryError):
                move()
        copy_stream.finish()
    assert move()
    copy_stream.finish()
    assert copy_stream.errors == []
