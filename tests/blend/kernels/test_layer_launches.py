"""What is worked out once for all layers is what would be worked out for each, and costs no more.

Whether the kernel places it right, interpreted_laying.py says, in Triton's interpreter.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from cacheblend_rag.blend.kernels.placement import COLUMNS, table_of, tables_of
from cacheblend_rag.blend.layer_part import LayerPart, WholePart
from cacheblend_rag.blend.rotary import Rotation
from cacheblend_rag.kv.chunk_kv import ChunkKV

DEPTH = 3
Layers = list[list[LayerPart]]


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


def test_layers_are_laid_in_tritons_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    module = "tests/blend/kernels/interpreted_laying.py"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", module]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
