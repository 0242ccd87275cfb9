"""The kernel that places chunks: right in Triton's interpreter, and compiled for GPUs without one.

What is worked out once for all layers is what would be worked out for each. A GPU runs the kernel,
too, if there is one.
"""

from __future__ import annotations

import re
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from cacheblend_rag.blend import FusedKV
from cacheblend_rag.blend.copy_stream import pinned_buffers_of
from cacheblend_rag.blend.kernels.placement import (
    COLUMNS,
    FP8,
    NATIVE,
    constants_of,
    place_kernel,
    table_of,
    tables_of,
)
from cacheblend_rag.blend.layer_part import LayerPart, WholePart
from cacheblend_rag.blend.placement import has_kernel, place_parts
from cacheblend_rag.blend.rotary import Rotation
from cacheblend_rag.blend.stack import Geometry
from cacheblend_rag.blend.transfer import Upload
from cacheblend_rag.kv.chunk_kv import ChunkKV
from tests.blend.kernels.gpus import GPUS, HOPPER, Compiled, Gpu, compiled
from tests.blend.kernels.interpreter import run_interpreted
from tests.blend.test_placement import part_of, turn_by

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
HEADS, DEPTH = 8, 3
Layers = list[list[LayerPart]]


def test_it_places_what_its_twin_does_and_lays_layers_in_tritons_interpreter() -> None:
    folder = "tests/blend/kernels"
    run_interpreted(f"{folder}/interpreted_placement.py", f"{folder}/interpreted_laying.py")


def compiled_for(gpu: Gpu, dtype: str, form: int, width: int, **options: Any) -> Compiled:
    pairs = options.get("pairs", width // 2)
    constants = constants_of(form, HEADS, width, pairs, options.get("align", 16))
    constants |= {"INTERLEAVED": options.get("interleaved", False)}
    names = [name for name in place_kernel.arg_names if name not in constants]
    types = {name: f"*{dtype}" if name.isupper() else "i32" for name in names}
    types |= {"TABLE": "*i64", "apart": "i64"}
    aligned = {*names} - {"first", "tiles", "total"}
    return compiled(place_kernel, gpu, types, constants, aligned=aligned)


@pytest.mark.parametrize("form", [NATIVE, FP8])
@pytest.mark.parametrize("gpu", GPUS, ids=str)
def test_it_is_compiled_for_gpus_without_spilling(gpu: Gpu, form: int) -> None:
    assert compiled_for(gpu, "bf16", form, 128).spilled == 0


@pytest.mark.parametrize(
    ("dtype", "form", "width", "options"),
    [
        ("fp32", NATIVE, 256, {}),
        ("fp16", FP8, 256, {}),
        ("bf16", FP8, 80, {"interleaved": True, "align": 1}),
        ("bf16", NATIVE, 96, {"pairs": 24}),
        ("fp16", NATIVE, 64, {"pairs": 0, "align": 2}),
    ],
)
def test_any_model_is_placed_without_spilling(
    dtype: str, form: int, width: int, options: dict[str, Any]
) -> None:
    assert compiled_for(HOPPER, dtype, form, width, **options).spilled == 0


def test_memory_is_read_and_written_sixteen_bytes_at_once() -> None:
    code = compiled_for(HOPPER, "bf16", NATIVE, 128).assembly
    assert len(re.findall(r"ld\.global[^\n]*\.v4\.b32", code)) == 6
    stores = re.findall(r"st\.global[^\n]*", code)
    assert stores
    assert all(".v4.b32" in store for store in stores)
    unaligned = compiled_for(HOPPER, "bf16", NATIVE, 128, align=2).assembly
    assert not re.findall(r"ld\.global[^\n]*\.v4\.b32", unaligned)


# Tables


@st.composite
def chunks(draw: st.DrawFn) -> tuple[list[WholePart], Layers]:
    """Chunks of which some tokens are placed, whole and layer by layer."""
    heads, width = draw(st.integers(1, 3)), draw(st.sampled_from([8, 24, 64]))
    pairs, dtype = draw(st.sampled_from([0, 4])), draw(st.sampled_from([torch.half, torch.float]))
    wholes: list[WholePart] = []
    layers: Layers = [[] for _ in range(DEPTH)]
    at = 0
    for _ in range(draw(st.integers(1, 5))):
        tokens, skip = draw(st.integers(1, 9)), draw(st.integers(0, 3))
        size = tokens + skip + draw(st.integers(0, 3))
        kv = ChunkKV(torch.randn(DEPTH, 2, heads, size, width).to(dtype), 0)
        stored = kv.packed() if draw(st.booleans()) else kv
        turn = None
        if draw(st.booleans()):
            angles = torch.randn(2, DEPTH, pairs)
            turn = Rotation(angles[0], angles[1])
        for layer in range(DEPTH):
            own = stored.layer(layer).cut(skip, skip + tokens)
            moved = None if turn is None else turn.of(layer)
            layers[layer].append(LayerPart(at, own, moved))
        wholes.append(WholePart(stored, replace(layers[0][-1], turn=turn)))
        at += tokens
    return wholes, layers


@settings(max_examples=150, deadline=None, derandomize=True)
@given(chunks())
def test_the_tables_of_all_layers_are_those_of_each(drawn: tuple[list[WholePart], Layers]) -> None:
    wholes, layers = drawn
    table, launches = tables_of(wholes)
    assert table.shape == (DEPTH, len(wholes), COLUMNS)
    for own, parts in zip(table.tolist(), layers, strict=True):
        rows, wanted = table_of(parts)
        assert own == rows
        assert [replace(one, align=0) for one in launches] == [
            replace(one, align=0) for one in wanted
        ]
        for one, other in zip(launches, wanted, strict=True):
            assert other.align % one.align == 0


def test_chunks_that_are_moved_in_different_ways_are_refused() -> None:
    kv = ChunkKV.of(torch.zeros(2, 1, 4, 8), torch.zeros(2, 1, 4, 8), 0)
    turns = [Rotation(torch.ones(2, pairs), torch.zeros(2, pairs)) for pairs in (2, 4)]
    wholes = [WholePart(kv, LayerPart(0, kv.layer(0), turn)) for turn in turns]
    with pytest.raises(ValueError, match="different ways"):
        tables_of(wholes)


# On a GPU


@GPU
def test_a_gpu_places_what_the_twin_does() -> None:
    assert has_kernel(torch.device("cuda", 0))


@GPU
@pytest.mark.parametrize("form", ["native", "fp8"])
@pytest.mark.parametrize("locked", [False, True])
def test_a_gpu_reads_chunks_where_they_are(locked: bool, form: Any) -> None:
    """In page-locked memory, or through buffers."""
    device = torch.device("cuda", 0)
    buffers = pinned_buffers_of(device)
    assert buffers is not None
    shape = Geometry(2, 8, 8, 128, torch.bfloat16, device)
    found, wanted = FusedKV(shape, 4096), FusedKV(shape, 4096)
    turn = turn_by(321, 64, interleaved=False, device=device)
    parts = []
    for index in range(16):
        part = part_of(torch.randn(2, 8, 256, 128).bfloat16(), form)
        if locked:
            part = part.moved([tensor.pin_memory() for tensor in part.tensors])
        parts.append(LayerPart(index * 256, part, turn if index % 2 else None))
    upload = Upload(buffers, found, 1, parts, buffers.copy_stream.worked())
    while not upload.go_on():
        time.sleep(0.001)
    upload.arrive()
    there = [
        LayerPart(one.start, one.kv.moved([t.to(device) for t in one.kv.tensors]), one.turn)
        for one in parts
    ]
    place_parts(wanted, 1, there)
    torch.testing.assert_close(found.keys[1], wanted.keys[1], atol=0.02, rtol=0.02)
    assert torch.equal(found.values[1], wanted.values[1])
