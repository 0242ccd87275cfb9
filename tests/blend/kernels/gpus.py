"""Compiles Triton kernels for GPUs that are not there: Triton brings NVIDIA's assembler."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

PROGRAMS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU. shared: bytes of memory that a program's threads may share."""

    name: str
    capability: tuple[int, int]
    shared: int

    def __str__(self) -> str:
        return self.name


AMPERE = Gpu("sm_80", (8, 0), 163 << 10)
ADA = Gpu("sm_89", (8, 9), 99 << 10)
HOPPER = Gpu("sm_90", (9, 0), 227 << 10)
GPUS = (AMPERE, ADA, HOPPER)


@dataclass(frozen=True)
class Compiled:
    """What a kernel takes. shared: bytes per program. spilled: bytes per thread that registers had
    no room for. assembly: PTX."""

    shared: int
    registers: int
    spilled: int
    assembly: str


def compiled(
    kernel: Any,
    gpu: Gpu,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    *,
    aligned: set[str],
    **options: Any,
) -> Compiled:
    """Compile a kernel as its launch would. types: of its arguments, as Triton names them; aligned:
    those of them that are multiples of 16."""
    names = list(kernel.arg_names)
    signature = {name: types.get(name, "constexpr") for name in names}
    source = ASTSource(
        kernel,
        signature,
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    major, minor = gpu.capability
    made = triton.compile(source, target=GPUTarget("cuda", 10 * major + minor, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(made.asm["cubin"])
        command = [PROGRAMS / "cuobjdump", "-res-usage", file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    used = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", done.stdout)
    assert used, done.stdout
    registers, stack, local = map(int, used.groups())
    return Compiled(made.metadata.shared, registers, max(stack, local), made.asm["ptx"])
