"""One layer of all chunks is placed, by a kernel where it works."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from cacheblend_rag.blend import placement
from cacheblend_rag.blend.fused import FusedKV
from cacheblend_rag.blend.layer_part import LayerPart
from cacheblend_rag.blend.placement import place_parts
from cacheblend_rag.blend.rotary import Rotation, rotated
from cacheblend_rag.blend.stack import Geometry
from cacheblend_rag.kv import ChunkKV
from cacheblend_rag.settings import Precision

META = torch.device("meta")


def buffer(heads: int, width: int, tokens: int, dtype: torch.dtype) -> FusedKV:
    fused = FusedKV(Geometry(2, heads, heads, width, dtype, torch.device("cpu")), tokens, 1)
    fused.keys.fill_(torch.nan)
    fused.values.fill_(torch.nan)
    return fused


def turn_by(by: float, pairs: int, *, interleaved: bool, device: Any = "cpu") -> Rotation:
    angles = (by * 0.9 ** torch.arange(pairs))[None]
    return Rotation(angles.cos().to(device), angles.sin().to(device), interleaved)


def part_of(kv: torch.Tensor, form: Precision) -> ChunkKV:
    own = ChunkKV(kv[None], 0)
    return own.packed(form)


@pytest.mark.parametrize("form", ["native", "fp8", "int4"])
def test_chunks_are_placed_one_after_the_other_and_nothing_else_is_written(form: Precision) -> None:
    fused = buffer(3, 8, 12, torch.bfloat16)
    wanted_keys, wanted_values = fused.keys.clone(), fused.values.clone()
    parts = []
    for start, by in ((1, turn_by(3, 4, interleaved=False)), (7, None)):
        own = part_of(torch.randn(2, 3, 4, 8).bfloat16(), form)
        parts.append(LayerPart(start, own, by))
        keys, values = own.keys[0], own.values[0]
        keys = keys if by is None else rotated(keys[None], by)[0]
        wanted_keys[1, :, start : start + 4] = keys
        wanted_values[1, :, start : start + 4] = values
    place_parts(fused, 1, parts)
    for found, there in ((fused.keys, wanted_keys), (fused.values, wanted_values)):
        torch.testing.assert_close(found, there, atol=0, rtol=0, equal_nan=True)


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
