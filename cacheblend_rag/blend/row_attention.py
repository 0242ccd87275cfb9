"""Chooses how rows attend over a layer's fused KV: the one place for every engine.

On NVIDIA GPUs a run of rows attends by FlashAttention, which PyTorch brings, and scattered rows by
a Triton kernel (`kernels.scattered`). Each is compared with PyTorch's plain attention when it is
first used for heads of some shape, and is not used if it fails or differs. Everything
else attends by `attend_rows`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor
from torch.backends import cuda
from torch.nn import functional

from cacheblend_rag.blend.attention import MaskCache, attend_rows, without_cudnn
from cacheblend_rag.blend.fused import FusedKV
from cacheblend_rag.blend.rows import Positions, Rows
from cacheblend_rag.blend.stack import AttentionCall, Geometry
from cacheblend_rag.memory import lack_of_memory

logger = logging.getLogger(__name__)

LEAST_CAPABILITY = (8, 0)
"""The compute capability from which on GPUs have what both kernels need."""
TESTED_TOKENS = 300
TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Largest difference from attention in float32, for values around 1."""
EXTRAS = ("window", "softcap", "sinks")
"""What attention may have that PyTorch's fused attention cannot compute."""

Kernel = Literal["flash", "scattered"]


class RowAttention:
    """An `Attention` for one pass.

    kernels: whether GPU kernels may be used; without them rows attend as on a CPU.
    """

    def __init__(self, *, kernels: bool = True) -> None:
        self._kernels, self._masks = kernels, MaskCache()

    def __call__(self, call: AttentionCall, fused: FusedKV, rows: Rows) -> Tensor:
        keys, values = fused.layer(call.layer)
        if call.window is not None and call.window > rows.last:
            call = replace(call, window=None)  # it reaches back to the first token
        if self._kernels and has_kernels(call.query.device):
            case = _Case.of(call, keys)
            if rows.is_run and not case.extras and works("flash", case):
                return attend_run(call, keys, values, rows)
            if works("scattered", case):
                return _attend_scattered(call, keys, values, rows)
        # Runs are long, and indexing and probes may not hold their masks.
        return attend_rows(call, keys, values, rows, None if rows.is_run else self._masks)


def attend_by_positions(call: AttentionCall, positions: Tensor, address: Tensor) -> Tensor:
    """Write rows' fresh KV where a prompt's is, and attend there, as a CUDA graph can hold it.

    positions: (rows,) int64 on the device, -1 for padding, at the end. address: see `KVAddress`.
    Returns (1, rows, heads, head_dim). Raises UnsupportedAttentionError where the kernel cannot be
    used.
    """
    from cacheblend_rag.blend.kernels.scattered import (  # Triton: only here
        KVAddress,
        attend_scattered,
        write_rows,
    )

    if not works("scattered", _Case.of(call, call.key)):
        raise UnsupportedAttentionError(f"the Triton kernel cannot be used for layer {call.layer}")
    place = KVAddress(address, call.layer)
    write_rows(call.key, call.value, positions, place)
    return attend_scattered(call, call.key, call.value, positions, place=place)


def can_attend_by_positions(of: Geometry) -> bool:
    """Whether the Triton attention kernel supports a model's device, dtype and head size."""
    if not has_kernels(of.device):
        return False
    from cacheblend_rag.blend.kernels.scattered import takes  # Triton: only here

    one = torch.empty(1, 1, 1, of.head_dim, dtype=of.dtype)
    return takes(one, one)


class UnsupportedAttentionError(RuntimeError):
    """The Triton attention kernel does not support a layer's dtype, head size or options."""


def attend_run(call: AttentionCall, keys: Tensor, values: Tensor, rows: Rows) -> Tensor:
    """Return the attention of consecutive rows, as `attend_rows` does, without a mask in memory.

    On devices without FlashAttention, PyTorch makes one.
    """
    from torch.nn.attention.bias import causal_lower_right  # imports the compiler: only on GPUs

    seen = rows.last + 1
    with without_cudnn():
        done = functional.scaled_dot_product_attention(
            call.query,
            keys[:, :, :seen],
            values[:, :, :seen],
            attn_mask=causal_lower_right(len(rows), seen),
            scale=call.scaling,
            enable_gqa=call.query.shape[1] != keys.shape[1],
        )
    return done.transpose(1, 2)


@lru_cache(maxsize=16)
def has_kernels(device: torch.device) -> bool:
    """Whether GPU kernels can be used on a device; CUDA builds of PyTorch bring Triton."""
    if device.type != "cuda" or torch.version.hip is not None or find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= LEAST_CAPABILITY


@dataclass(frozen=True)
class _Case:
    """What a kernel is compiled for: heads of some shape, and which of EXTRAS attention has."""

    device: torch.device
    dtype: torch.dtype
    heads: int
    kv_heads: int
    head_dim: int
    extras: tuple[str, ...]

    @classmethod
    def of(cls, call: AttentionCall, keys: Tensor) -> _Case:
        _, heads, _, head_dim = call.query.shape
        extras = tuple(name for name in EXTRAS if getattr(call, name) is not None)
        query = call.query
        return cls(query.device, query.dtype, heads, keys.shape[1], head_dim, extras)

    def __str__(self) -> str:
        return (
            f"{self.heads} heads ({self.kv_heads} of KV) of {self.head_dim} {self.dtype} "
            f"with {', '.join(self.extras) or 'no extras'} on {self.device}"
        )


@lru_cache(maxsize=256)
def works(kernel: Kernel, case: _Case) -> bool:
    """Whether a kernel computes what `attend_rows` does; tested once, which compiles it.

    Raises errors of memory, which say nothing about the kernel, and of a device that has failed.
    """
    try:
        difference = _difference(kernel, case)
    except torch.AcceleratorError:
        raise
    except Exception as error:  # a kernel only saves time: whatever stops it, attention goes on
        if lack_of_memory(error) is not None:
            raise
        why = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    else:
        if difference is None:
            return False
        if difference <= TOLERANCE[case.dtype]:
            return True
        why = f"its results differ by {difference:.2g}"
    logger.warning(
        "the %s attention kernel is not used for %s (PyTorch's is): %s", kernel, case, why
    )
    return False


@torch.inference_mode()
def _difference(kernel: Kernel, case: _Case) -> float | None:
    """Return how far a kernel's results are from plain attention in float32; None: not for it."""
    draw = torch.Generator().manual_seed(0)
    places = np.arange(100, TESTED_TOKENS, 1 if kernel == "flash" else 3)
    rows = Rows.at(cast(Positions, places), case.device)

    def made(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw).to(case.device, case.dtype)

    query = made(1, case.heads, len(rows), case.head_dim)
    keys, values = (made(1, case.kv_heads, TESTED_TOKENS, case.head_dim) for _ in range(2))
    extras = {"window": 77, "softcap": 3.0, "sinks": made(case.heads)}
    own: dict[str, Any] = {name: extras[name] for name in case.extras}
    call = AttentionCall(0, query, keys, values, case.head_dim**-0.5, **own)
    if kernel == "flash":
        if case.dtype not in TOLERANCE or not _flash_takes(query, keys):
            return None
        results = [attend_run(call, keys, values, rows)]
    else:
        from cacheblend_rag.blend.kernels.scattered import takes, tiles_on  # Triton: only here

        if not takes(query, keys):
            return None
        results = [
            _attend_scattered(call, keys, values, rows, tile)
            for tile in tiles_on(case.device, case.head_dim, plain=not case.extras)
        ]
    wide = replace(call, query=query.float())
    wanted = attend_rows(wide, keys.float(), values.float(), rows)
    differences = [(done.float() - wanted).abs() for done in results]
    return float(torch.stack(differences).nan_to_num(nan=torch.inf).max())


def _flash_takes(query: Tensor, keys: Tensor) -> bool:
    of = cuda.SDPAParams(query, keys, keys, None, 0.0, False, query.shape[1] != keys.shape[1])
    return bool(cuda.can_use_flash_attention(of))


def _attend_scattered(
    call: AttentionCall, keys: Tensor, values: Tensor, rows: Rows, tile: Any = None
) -> Tensor:
    from cacheblend_rag.blend.kernels.scattered import attend_scattered  # Triton: only here

    return attend_scattered(call, keys, values, rows.device, tile=tile)
