"""Products of matrices by oneDNN, which PyTorch brings but does not use for all of them.

PyTorch multiplies float32 through MKL, which is slow on CPUs that Intel did not make: on AMD's with
AVX-512 oneDNN takes half the time or less (docs/benchmarks.md, "Attention by matrix products"). On
Intel's MKL is as fast in large products and faster in single rows ("On Intel's CPUs" there).
"""

from __future__ import annotations

import os
import platform
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

OPERATORS = ("_reorder_linear_weight", "_linear_pointwise")
"""PyTorch's compiler uses them; builds without oneDNN lack them, and later versions may."""
LIMIT = "ONEDNN_MAX_CPU_ISA"
"""The environment variable by which users restrict the instructions that oneDNN uses."""
WITHOUT_AVX512 = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2")
"""Its values that exclude AVX-512."""
CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""The environment variables that set how many entries oneDNN's primitive cache and PyTorch's own
cache of oneDNN primitives hold."""
KEPT_PRODUCTS = "208"
"""The size of these caches, in compiled matrix products: enough for a prompt of 32k tokens with up
to four query heads per KV head, or of 16k tokens with eight. A product takes about 0.5 MB, and each
shape needs its own: with the default, 1,024, a server with prompts of many lengths grew by 1 GB."""

CPUINFO = Path("/proc/cpuinfo")
"""The file in which Linux lists its CPUs, with their vendor."""
LEAST_TOKENS = 1024
"""Minimum prompt length, in tokens, for attention through oneDNN: shorter prompts gain little, and
each new length adds compiled primitives to its cache."""


def has_onednn() -> bool:
    """Whether this is an x86 CPU, and PyTorch has oneDNN's operators and may use them."""
    is_x86 = platform.machine() in {"x86_64", "AMD64"}
    has_all = all(hasattr(torch.ops.mkldnn, name) for name in OPERATORS)
    return is_x86 and has_all and bool(torch.backends.mkldnn.enabled)


def has_slow_mkl() -> bool:
    """Whether oneDNN is available on a CPU for which MKL is not optimized: any but Intel's."""
    return has_onednn() and not is_intel()


def onednn_is_faster() -> bool:
    """Whether oneDNN's matmuls of all sizes beat MKL's: on non-Intel CPUs with AVX-512."""
    return _may_use_avx512() and has_slow_mkl()


@cache
def is_intel() -> bool:
    """Whether the operating system reports an Intel CPU; Linux and Windows report the vendor."""
    try:
        told = CPUINFO.read_text()
    except OSError:  # not Linux
        told = platform.processor()
    return "GenuineIntel" in told


def bound_caches() -> None:
    """Set the environment variables of `CACHES` to `KEPT_PRODUCTS`, unless the user has set them.

    They are read once, at the first oneDNN operation of the process.
    """
    for name in CACHES:
        os.environ.setdefault(name, KEPT_PRODUCTS)


@cache
def _may_use_avx512() -> bool:
    """Whether the CPU has AVX-512, and the environment does not forbid its use."""
    is_forbidden = os.environ.get(LIMIT, "").upper() in WITHOUT_AVX512
    return torch.backends.cpu.get_cpu_capability() == "AVX512" and not is_forbidden


def onednn_linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return (..., out): ``rows`` (..., in) times ``weight`` (out, in) transposed, plus the bias.

    Like ``torch.nn.functional.linear``, without gradients. weight: dense, or in oneDNN's layout.
    """
    product: Tensor = torch.ops.mkldnn._linear_pointwise.default(rows, weight, bias, "none", [], "")
    return product
