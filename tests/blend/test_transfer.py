"""KV that is copied beside a device's work: on a fake that is late, and on a GPU if there is one.

What a fake cannot show is that CUDA does as it is told; what a GPU seldom shows is what goes wrong
only when a copy is late.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from cacheblend_rag.blend import FusedKV, RingKV
from cacheblend_rag.blend.lane import CudaLane, Stages, stages_of
from cacheblend_rag.blend.rotary import Rotation
from cacheblend_rag.blend.stack import Geometry
from cacheblend_rag.blend.transfer import Download, LayerPart, Numbers, Sendable, Upload, to_host
from cacheblend_rag.kv.packed_kv import PackedLayer
from cacheblend_rag.kv.precision import pack
from tests.blend.fake_lane import FakeLane, use
from tests.blend.fake_stack import FREQUENCIES, HEAD_DIM, KV_HEADS, LAYERS, FakeStack
from tests.prefill.prompts import run

ROW_BYTES = 2 * KV_HEADS * HEAD_DIM * 4
TOKENS = 30
CHUNKS = ((1, 7, 5), (9, 3, None), (12, 11, -4))
"""Where chunks start, their tokens, and how far they are moved."""
GPU = pytest.param(
    "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
)


@pytest.fixture(params=["fake", GPU])
def lane(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    if request.param == "cuda":
        yield CudaLane(torch.device("cuda", 0))
        torch.cuda.synchronize()
        return
    fake = FakeLane()
    fake.watch(monkeypatch)
    yield fake
    fake.finish()
    assert fake.errors == []
    assert all(name.startswith("kv-cut") for name in fake.waited_in), "others never wait"


def geometry(lane: Any) -> Geometry:
    device = torch.device("cpu" if isinstance(lane, FakeLane) else "cuda")
    return Geometry(LAYERS, KV_HEADS, KV_HEADS, HEAD_DIM, torch.float32, device)


def turn_of(by: int | None, device: torch.device) -> Rotation | None:
    if by is None:
        return None
    angles = (by * FREQUENCIES)[None].to(device)
    return Rotation(angles.cos(), angles.sin())


def parts_of(layer: int, device: torch.device, form: Any = "native") -> list[LayerPart]:
    draw = torch.Generator().manual_seed(layer)
    return [
        LayerPart(
            start,
            formed(torch.randn(2, KV_HEADS, tokens, HEAD_DIM, generator=draw), form),
            turn_of(by, device),
        )
        for start, tokens, by in CHUNKS
    ]


def formed(kv: Tensor, form: Any) -> Sendable:
    if form == "native":
        return Numbers(*kv)
    return PackedLayer.of(*pack(*kv, form), form, kv.dtype)


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


def laid_plainly(kind: str, lane: Any, form: Any = "native") -> list[tuple[Tensor, Tensor]]:
    fused, found = buffer(kind, geometry(lane)), []
    for layer in range(LAYERS):
        for part in parts_of(layer, fused.keys.device, form):
            kv = part.kv.unpacked() if isinstance(part.kv, PackedLayer) else part.kv.tensors
            fused.lay(layer, part.start, *kv, part.turn)
        found.append(tuple(kv.clone() for kv in fused.layer(layer)))
    return found


@pytest.mark.parametrize("rows", [1, 4, 9, 100])
@pytest.mark.parametrize("most", [1, 2, 3])
@pytest.mark.parametrize("kind", ["fused", "ring"])
@pytest.mark.parametrize("form", ["native", "fp8", "int8"])
def test_what_is_laid_beside_the_work_is_what_is_laid_plainly(
    lane: Any, form: str, kind: str, most: int, rows: int
) -> None:
    """Each layer is asked for while the one before it is at work, through a few small stages."""
    stages, fused = Stages(lane, most, rows * ROW_BYTES), buffer(kind, geometry(lane))
    found = []
    free = lane.worked()
    for layer in range(LAYERS):
        upload = Upload(stages, fused, layer, parts_of(layer, fused.keys.device, form), free)
        if layer:
            found.append(tuple(kv.clone() for kv in fused.layer(layer - 1)))
        sent(upload)
        upload.arrive()
        free = lane.worked()
    found.append(tuple(kv.clone() for kv in fused.layer(LAYERS - 1)))
    for one, other in zip(found, laid_plainly(kind, lane, form), strict=True):
        for part, wanted in zip(one, other, strict=True):
            assert torch.equal(part.nan_to_num(7.0), wanted.nan_to_num(7.0))


def test_stages_are_few_and_one_is_used_anew_only_when_its_copies_are_done() -> None:
    lane = FakeLane(patience=None)
    stages = Stages(lane, 2, 3 * ROW_BYTES)
    fused = buffer("fused", geometry(lane))
    upload = Upload(stages, fused, 0, parts_of(0, fused.keys.device), lane.worked())
    looks = 0
    while not upload.go_on():  # 21 rows through two stages of three
        asked = lane.asked
        assert not upload.go_on(), "as long as the device does nothing"
        assert lane.asked == asked
        assert stages.take() is None
        lane.run_until(lane.done + 1)
        looks += 1
    assert looks > 5
    lane.finish()
    assert len({id(stages.take()), id(stages.take()), id(None)}) == 3
    assert stages.take() is None
    assert len(lane.made) == 4, "a host's and a device's each"
    assert sum(made.nbytes for made in lane.made) == 2 * 2 * 3 * ROW_BYTES
    assert lane.waited_in == lane.errors == []


def test_pinned_memory_is_copied_from_where_it_lies_and_held_until_then() -> None:
    lane = FakeLane()
    stages, fused = Stages(lane, 2, 40 * ROW_BYTES), buffer("fused", geometry(lane))
    upload = Upload(
        stages, fused, 0,
        (LayerPart(p.start, Numbers(*(lane.pin(kv.clone()) for kv in p.kv.tensors)), p.turn)
         for p in parts_of(0, fused.keys.device)),
        lane.worked(),
    )  # fmt: skip
    assert upload.go_on()
    staged = lane.made[0]
    upload.arrive()
    assert lane.errors == []
    assert torch.equal(staged, torch.full_like(staged, 0xFF)), "nothing went through the stage"
    for one, other in zip(fused.layer(0), laid_plainly("fused", lane)[0], strict=True):
        assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))


def test_what_is_on_the_device_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    lane = FakeLane()
    stages, fused = Stages(lane, 2, 40 * ROW_BYTES), buffer("fused", geometry(lane))
    monkeypatch.setattr(lane, "copy", None)
    parts = [
        LayerPart(p.start, Numbers(*(lane.put_here(kv) for kv in p.kv.tensors)), p.turn)
        for p in parts_of(0, fused.keys.device)
    ]
    upload = Upload(stages, fused, 0, parts, lane.worked())
    assert upload.go_on()
    upload.arrive()
    assert lane.errors == []
    for one, other in zip(fused.layer(0), laid_plainly("fused", lane)[0], strict=True):
        assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))


@pytest.mark.parametrize("rows", [1, 4, 9, 100])
@pytest.mark.parametrize("most", [1, 2, 3])
def test_what_is_fetched_is_what_was_there_though_a_ring_is_written_over(
    lane: Any, most: int, rows: int
) -> None:
    shape = geometry(lane)
    stages, ring = Stages(lane, most, rows * ROW_BYTES), buffer("ring", shape)
    draw = torch.Generator().manual_seed(1)
    wanted = torch.randn(LAYERS, 2, KV_HEADS, TOKENS, HEAD_DIM, generator=draw)
    into, download = torch.full_like(wanted[..., 3:20, :], torch.nan), Download(stages)
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
    given_back = [stages.take() for _ in range(most)]
    assert len({id(stage) for stage in given_back if stage is not None}) == most
    assert stages.take() is None


def test_numbers_of_a_token_each_are_fetched(lane: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, Stages(lane, 2, 16))
    numbers = torch.rand(23)
    there = numbers.to(geometry(lane).device)
    found = run(to_host(FakeStack(), there))
    assert not found.is_cuda
    assert torch.equal(found, numbers)


def test_a_writer_that_fails_says_so_and_gives_its_stage_back() -> None:
    lane = FakeLane()
    stages = Stages(lane, 1, 100)
    download = Download(stages)
    download.add([(torch.empty(2, 3), torch.empty(1, 5, 1))])

    def finished() -> None:
        while not download.is_done():
            time.sleep(0.001)

    with pytest.raises(RuntimeError):
        finished()
    assert stages.take() is not None


def test_threads_share_stages() -> None:
    lane = FakeLane()
    stages = Stages(lane, 3, 4 * ROW_BYTES)
    found: list[bool] = []

    def send(number: int) -> None:
        fused = buffer("fused", geometry(lane))
        for layer in range(LAYERS):
            parts = parts_of(layer, fused.keys.device)
            upload = Upload(stages, fused, layer, parts, lane.worked())
            sent(upload)
            upload.arrive()
        wanted = laid_plainly("fused", lane)
        found.append(
            all(
                torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))
                for layer in range(LAYERS)
                for one, other in zip(fused.layer(layer), wanted[layer], strict=True)
            )
        )

    threads = [threading.Thread(target=send, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == [True] * 4
    assert len(lane.made) <= 6


def test_a_cpu_has_no_stages() -> None:
    assert stages_of(torch.device("cpu")) is None
    assert stages_of(torch.device("meta")) is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("form", ["native", "fp8", "int8"])
def test_nothing_on_the_way_synchronizes_a_gpu(form: str) -> None:
    device = torch.device("cuda", 0)
    stages = stages_of(device)
    assert stages is stages_of(torch.device("cuda")) is not None
    shape = Geometry(2, 8, 8, 128, torch.bfloat16, device)
    fused = RingKV(shape, 2048)
    kv = torch.randn(2, 8, 2048, 128).bfloat16()
    turn = turn_of(3, device)
    for _ in range(2):  # memory is made the first time
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            parts = [LayerPart(0, formed(kv, form), turn)]
            upload = Upload(stages, fused, 0, parts, stages.lane.worked())
            while not upload.go_on():
                time.sleep(0.001)
            upload.arrive()
            download, into = Download(stages), torch.empty_like(kv)
            download.add(zip(into, fused.of_layer(0), strict=True))
            while not download.is_done():
                time.sleep(0.001)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    sent = formed(kv, form)
    values = sent.unpacked()[1] if isinstance(sent, PackedLayer) else kv[1]
    assert torch.equal(into[1], values)
    assert not torch.equal(into[0], kv[0])


@pytest.mark.parametrize("what", ["pinned", "scratch", "run", "copy"])
@pytest.mark.parametrize("way", ["up", "down"])
def test_no_stage_is_lost_where_there_is_no_memory(
    way: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two stages are all there are: a third failure would find none otherwise."""
    lane = FakeLane()
    stages, fused = Stages(lane, 2, 40 * ROW_BYTES), buffer("fused", geometry(lane))

    def move() -> bool:
        if way == "up":
            return Upload(stages, fused, 0, parts_of(0, fused.keys.device), lane.worked()).go_on()
        download = Download(stages)
        download.add([(torch.empty(KV_HEADS, TOKENS, HEAD_DIM), fused.of_layer(0)[0])])
        return download.go_on()

    def refused(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    for _ in range(3):
        with monkeypatch.context() as patch:
            patch.setattr(lane, what, refused)
            if what in {"pinned", "scratch"}:
                assert stages.release() >= 0
            with pytest.raises(torch.OutOfMemoryError):
                move()
        lane.finish()
    assert move()
    lane.finish()
    assert lane.errors == []


def test_released_stages_are_made_anew() -> None:
    lane = FakeLane(patience=None)
    stages = Stages(lane, 2, 40 * ROW_BYTES)
    one, other = stages.take(), stages.take()
    assert one is not None
    assert other is not None
    stages.give(one)
    assert stages.release() == 2 * 40 * ROW_BYTES, "the other is in use"
    assert stages.release() == 0
    assert stages.take() is not one
    assert stages.take() is None
