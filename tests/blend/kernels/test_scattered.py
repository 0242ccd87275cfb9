"""The attention kernel: what it computes, in Triton's interpreter, and that it fits on GPUs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cacheblend_rag.blend.kernels import scattered
from cacheblend_rag.blend.kernels.scattered import constants_of, takes, tiles_for
from tests.blend.kernels.gpus import ADA, AMPERE, GPUS, HOPPER, Compiled, Gpu, compiled
from tests.blend.kernels.interpreter import run_interpreted

PLAIN = {"window": False, "softcap": False, "sinks": False}
EVERYTHING = {"window": True, "softcap": True, "sinks": True}
NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16"}
MOST_SPILLED = {AMPERE: 256, ADA: 256, HOPPER: 0}
LARGE, SMALL = 0, 1


def test_it_computes_what_pytorch_does_in_the_interpreter() -> None:
    run_interpreted("tests/blend/kernels/interpreted_scattered.py")


def compiled_for(
    gpu: Gpu,
    head_dim: int,
    *,
    size: int,
    dtype: torch.dtype = torch.bfloat16,
    placed: bool = False,
    **given: bool,
) -> Compiled:
    options = {**PLAIN, **given}
    constants = {**constants_of(dtype, 4, head_dim, **options)}
    tile = tiles_for(gpu.capability, head_dim, plain=not any(given.values()))[size]
    number = f"*{NAMES[dtype]}"
    steps = {f"{of}_{by}" for of in "qo" for by in ("head", "row")}
    steps |= {f"{of}_{by}" for of in "kv" for by in ("head", "token")}
    types = {
        "query": number, "keys": number, "values": number, "out": number, "positions": "*i64",
        "sinks": number if options["sinks"] else "*i64",
        **dict.fromkeys(("scaling", "softcap"), "fp32"),
        "place": "*i64",
        **dict.fromkeys(steps | {"layer", "rows", "window"}, "i32"),
    }  # fmt: skip
    aligned = {"query", "keys", "values", "out"} | steps
    constants |= {"PLACED": placed, "M": tile.rows, "N": tile.keys}
    return compiled(
        scattered._attend, gpu, types, constants, aligned=aligned,
        num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=True,
    )  # fmt: skip


@pytest.mark.parametrize("gpu", GPUS, ids=str)
@pytest.mark.parametrize("head_dim", [64, 256])
def test_it_fits_the_registers_and_the_shared_memory_of_gpus(gpu: Gpu, head_dim: int) -> None:
    plain: list[dict[str, Any]] = [{"size": LARGE}, {"size": LARGE, "placed": True}]
    for options in (
        *(plain if gpu is HOPPER else ()),  # which has a tile of its own for them
        {"size": LARGE, "placed": True, **EVERYTHING},
        {"size": SMALL, **EVERYTHING},
    ):
        made = compiled_for(gpu, head_dim, **options)
        assert made.spilled <= MOST_SPILLED[gpu], options
        assert made.shared <= gpu.shared, options
        assert ("wgmma" if gpu is HOPPER else "mma.sync") in made.assembly, "tensor cores"


@pytest.mark.parametrize("gpu", GPUS, ids=str)
def test_it_fits_with_other_numbers_and_with_heads_that_are_padded(gpu: Gpu) -> None:
    for made in (
        compiled_for(gpu, 80, size=LARGE),
        compiled_for(gpu, 128, size=LARGE, dtype=torch.float16),
        compiled_for(gpu, 128, size=LARGE, placed=True),
    ):
        assert made.spilled <= MOST_SPILLED[gpu]
        assert made.shared <= gpu.shared


@pytest.mark.parametrize("gpu", GPUS, ids=str)
@pytest.mark.parametrize("head_dim", [80, 128])
def test_the_kernel_that_writes_rows_fits(gpu: Gpu, head_dim: int) -> None:
    padded = 1 << (head_dim - 1).bit_length()
    types = dict.fromkeys(("layer", "rows", "k_head", "k_row", "v_head", "v_row"), "i32")
    types |= {"keys": "*bf16", "values": "*bf16", "positions": "*i64", "place": "*i64"}
    made = compiled(
        scattered._write, gpu, types,
        {"D": head_dim, "PADDED": padded, "N": scattered.ROWS_WRITTEN},
        aligned={"keys", "values", "k_head", "k_row", "v_head", "v_row"}, num_warps=4,
    )  # fmt: skip
    assert not made.spilled
    if head_dim != 80:
        assert "st.global.v4.b32" in made.assembly, "16 bytes at once"


def numbers(dtype: torch.dtype, head_dim: int = 128, batch: int = 1) -> torch.Tensor:
    return torch.zeros(batch, 2, 3, head_dim, dtype=dtype)


def test_it_says_what_it_cannot_compute() -> None:
    half = numbers(torch.float16)
    assert takes(half, half)
    assert not takes(half, numbers(torch.float8_e4m3fn))
    assert takes(numbers(torch.bfloat16, 64), numbers(torch.bfloat16, 64))
    assert not takes(numbers(torch.float32), numbers(torch.float32))
    assert not takes(half, numbers(torch.bfloat16))
    for head_dim in (32, 63, 257, 512):
        assert not takes(numbers(torch.float16, head_dim), numbers(torch.float16, head_dim))
    assert not takes(numbers(torch.float16, batch=2), numbers(torch.float16, batch=2))
