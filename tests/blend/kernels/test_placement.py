"""The kernel that places chunks: right in Triton's interpreter, and compiled for GPUs without one.

A GPU runs it, too, if there is one.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from cacheblend_rag.blend import FusedKV  # noqa: E402
from cacheblend_rag.blend.copy_stream import pinned_buffers_of  # noqa: E402
from cacheblend_rag.blend.kernels.placement import (  # noqa: E402
    FP8,
    NATIVE,
    constants_of,
    place_kernel,
)
from cacheblend_rag.blend.layer_part import LayerPart  # noqa: E402
from cacheblend_rag.blend.placement import has_kernel, place_parts  # noqa: E402
from cacheblend_rag.blend.stack import Geometry  # noqa: E402
from cacheblend_rag.blend.transfer import Upload  # noqa: E402
from tests.blend.test_placement import part_of, turn_by  # noqa: E402

GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
WIDE = {"apart"}
HEADS = 8
POINTERS = {"TABLE": "*i64"}


def test_it_places_what_its_twin_does() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    module = "tests.blend.kernels.interpreted_placement"
    done = subprocess.run(
        [sys.executable, "-m", module], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def compiled(capability: int, dtype: str, form: int, width: int, **options: Any) -> Any:
    """Compile the kernel for a GPU that need not be there."""
    pairs = options.get("pairs", width // 2)
    constants = constants_of(form, HEADS, width, pairs, options.get("align", 16))
    constants |= {"INTERLEAVED": options.get("interleaved", False)}
    names = list(place_kernel.arg_names)
    signature = {
        name: POINTERS.get(
            name, f"*{dtype}" if name.isupper() else "i64" if name in WIDE else "i32"
        )
        for name in names
    }
    signature |= dict.fromkeys(constants, "constexpr")
    aligned = [name for name in names if name not in {*constants, "first", "tiles", "total"}]
    source = ASTSource(
        place_kernel,
        signature,
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    return triton.compile(source, target=GPUTarget("cuda", capability, 32))


def stack_bytes(kernel: Any, folder: Path) -> int:
    """How much each thread keeps in memory instead of registers."""
    file = folder / "kernel.cubin"
    file.write_bytes(kernel.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    said = subprocess.run(
        [tool, "-res-usage", file], capture_output=True, text=True, check=True
    ).stdout
    found = re.search(r"STACK:(\d+).*?LOCAL:(\d+)", said)
    assert found is not None, said
    return int(found[1]) + int(found[2])


@pytest.mark.parametrize("form", [NATIVE, FP8])
@pytest.mark.parametrize("capability", [80, 89, 90])
def test_it_is_compiled_for_gpus_without_spilling(
    capability: int, form: int, tmp_path: Path
) -> None:
    assert stack_bytes(compiled(capability, "bf16", form, 128), tmp_path) == 0


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
    dtype: str, form: int, width: int, options: dict[str, Any], tmp_path: Path
) -> None:
    assert stack_bytes(compiled(90, dtype, form, width, **options), tmp_path) == 0


def test_memory_is_read_and_written_sixteen_bytes_at_once() -> None:
    code = compiled(90, "bf16", NATIVE, 128).asm["ptx"]
    assert len(re.findall(r"ld\.global[^\n]*\.v4\.b32", code)) == 6
    stores = re.findall(r"st\.global[^\n]*", code)
    assert stores
    assert all(".v4.b32" in store for store in stores)
    unaligned = compiled(90, "bf16", NATIVE, 128, align=2).asm["ptx"]
    assert not re.findall(r"ld\.global[^\n]*\.v4\.b32", unaligned)


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
