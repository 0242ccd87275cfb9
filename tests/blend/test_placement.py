"""One layer of all chunks is placed together as each would be alone, in few operations."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheblend_rag.blend import placement
from cacheblend_rag.blend.fused import FusedKV
from cacheblend_rag.blend.layer_part import LayerPart, Numbers, Sendable
from cacheblend_rag.blend.placement import place_parts
from cacheblend_rag.blend.rotary import Rotation
from cacheblend_rag.blend.stack import Geometry
from cacheblend_rag.kv.packed_kv import PackedLayer
from cacheblend_rag.kv.precision import pack
from tests.operations import Operations

META = torch.device("meta")
MOST_OPERATIONS = {torch.float32: 6, torch.bfloat16: 12}
"""To place a layer of any number of chunks; they may only fall."""
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def buffer(heads: int, width: int, tokens: int, dtype: torch.dtype, device: Any = "cpu") -> FusedKV:
    fused = FusedKV(Geometry(2, heads, heads, width, dtype, torch.device(device)), tokens, 1)
    fused.keys.fill_(torch.nan)
    fused.values.fill_(torch.nan)
    return fused


def turn_by(by: float, pairs: int, *, interleaved: bool, device: Any = "cpu") -> Rotation:
    angles = (by * 0.9 ** torch.arange(pairs))[None]
    return Rotation(angles.cos().to(device), angles.sin().to(device), interleaved)


def part_of(kv: torch.Tensor, form: Any) -> Sendable:
    return Numbers(*kv) if form == "native" else PackedLayer(*pack(*kv), kv.dtype)


@st.composite
def layers(draw: st.DrawFn) -> tuple[FusedKV, list[LayerPart]]:
    heads, width = draw(st.integers(1, 3)), draw(st.sampled_from([4, 8, 10]))
    dtype, interleaved = draw(st.sampled_from(DTYPES)), draw(st.booleans())
    pairs = draw(st.sampled_from([0, 1, width // 4, width // 2]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    parts, at = [], draw(st.integers(0, 3))
    for _ in range(draw(st.integers(1, 5))):
        tokens = draw(st.integers(1, 7))
        whole = torch.randn(2, heads, tokens + 2, width, generator=generator).to(dtype)
        part = part_of(whole, draw(st.sampled_from(["native", "fp8"])))
        skip = draw(st.integers(0, 2))
        by = draw(st.none() | st.integers(-99, 999))
        turn = None if by is None else turn_by(by, pairs, interleaved=interleaved)
        parts.append(LayerPart(at, part.cut(skip, skip + tokens), turn))
        at += tokens + draw(st.integers(0, 3))
    return buffer(heads, width, at, dtype), parts


@settings(max_examples=200, deadline=None, derandomize=True)
@given(layers(), st.integers(0, 1), st.sampled_from([1, 200, 1 << 20]))
def test_chunks_are_placed_together_as_each_is_alone(
    drawn: tuple[FusedKV, list[LayerPart]], layer: int, cached: int
) -> None:
    """Bit for bit, and nothing else is written."""
    fused, parts = drawn
    wanted = FusedKV(fused._geometry, fused.tokens, 1)
    wanted.keys.copy_(fused.keys)
    wanted.values.copy_(fused.values)
    for part in parts:
        wanted.place(layer, part.start, *part.kv.unpacked(), part.turn)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(placement, "CACHED_BYTES", cached)
        place_parts(fused, layer, parts)
    for found, there in ((fused.keys, wanted.keys), (fused.values, wanted.values)):
        torch.testing.assert_close(found, there, atol=0, rtol=0, equal_nan=True)


def operations(count: int, dtype: torch.dtype, turn: str = "all") -> Operations:
    """Place a layer of so many chunks on the meta device."""
    fused = buffer(8, 64, count * 20, dtype, META)
    kv = torch.empty(2, 8, 16, 64, dtype=dtype, device=META)
    by = turn_by(3, 16 if turn == "partly" else 32, interleaved=False, device=META)
    moved = [by if turn != "some" or index % 2 else None for index in range(count)]
    parts = [LayerPart(index * 20, Numbers(*kv), by) for index, by in enumerate(moved)]
    with torch.inference_mode(), Operations() as seen:
        place_parts(fused, 0, parts)
    return seen


@pytest.mark.parametrize("turn", ["all", "some", "partly"])
@pytest.mark.parametrize("dtype", MOST_OPERATIONS)
def test_any_number_of_chunks_takes_the_same_few_operations(dtype: torch.dtype, turn: str) -> None:
    few, many = operations(2, dtype, turn), operations(40, dtype, turn)
    assert few.launched == many.launched
    assert 0 < many.launched.total() <= MOST_OPERATIONS[dtype], many.launched
    assert many.reads == []


def test_a_kernel_is_for_gpus_where_it_works(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Elsewhere nobody looks for it; where it fails, or is wrong, it is not used."""
    looked: list[torch.device] = []
    answers: dict[int, Any] = {0: True, 1: False, 2: RuntimeError("no compiler")}

    def tried(device: torch.device) -> bool:
        looked.append(device)
        answer = answers[device.index]
        if isinstance(answer, Exception):
            raise answer
        return bool(answer)

    monkeypatch.setattr(placement, "_places_alike", tried)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    placement.has_kernel.cache_clear()
    try:
        gpus = [torch.device("cuda", index) for index in answers]
        found = [placement.has_kernel(device) for device in (torch.device("cpu"), META, *gpus)]
        assert found == [False, False, importlib.util.find_spec("triton") is not None, False, False]
        assert all(device.type == "cuda" for device in looked)
        assert len(caplog.records) == max(0, len(looked) - 1)
    finally:
        placement.has_kernel.cache_clear()
