"""Packs chunk KV into 8-bit numbers (fp8: e4m3), rounded once when it is stored.

Each head has a scale, separate for keys and values. All scales are powers of two. So rounded
numbers are exact in the model's own type, and rounding them again changes nothing: a chunk has the
same numbers in every tier, however often it was moved.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

CODES = torch.float8_e4m3fn
_LARGEST = 448.0
_NAN = 0x7F
_LEAST_EXPONENT, _MOST_EXPONENT = -120, 126
_HEADROOM = 15 / 16
"""Share of a dtype's largest number at which values are clamped, since rounding up overflows."""


def pack(numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes and exponents of one layer.

    Args:
        numbers: (2, kv_heads, tokens, head_dim), keys before values.

    Returns:
        Codes, of the same shape, and the exponents of their scales, (2 * kv_heads,) int8.
    """
    most = torch.finfo(numbers.dtype).max * _HEADROOM
    kv = numbers.float().clamp(-most, most)
    exponents = _exponents(kv)
    return (kv * _scales_of(-exponents)).to(CODES), exponents.flatten().to(torch.int8)


def unpack(codes: Tensor, exponents: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers of what ``pack`` returned, of one layer or of several in one tensor."""
    # Exact whatever it is computed in, but that float16 has no scale so small.
    working = torch.float32 if dtype == torch.float16 else dtype
    scales = _scales_of(_by_head(codes, exponents)).to(working)
    return _numbers(codes).to(working).mul_(scales).to(dtype)


def are_finite(codes: Tensor, exponents: Tensor, dtype: torch.dtype) -> bool:
    """Whether codes, of any layers, decode to finite numbers of a dtype.

    Raises nothing, whatever bytes they are; exponents are to be ``are_written`` ones.
    """
    magnitudes = _magnitudes(codes)
    if int(magnitudes.amax()) == _NAN:
        return False
    most = torch.finfo(dtype).max
    if math.ldexp(_LARGEST, int(exponents.max())) <= most:
        return True
    extremes = magnitudes.amax((-2, -1), keepdim=True).view(CODES).double()
    return not bool((torch.ldexp(extremes, _by_head(codes, exponents).int()) > most).any())


def are_written(exponents: Tensor) -> bool:
    """Whether exponents are in the range that ``pack`` returns."""
    least, most = torch.aminmax(exponents)
    return int(least) >= _LEAST_EXPONENT and int(most) <= _MOST_EXPONENT


def _by_head(codes: Tensor, exponents: Tensor) -> Tensor:
    """Return exponents, not copied, in a shape that broadcasts with their codes."""
    return exponents.view(*codes.shape[:-2], 1, 1)


def _magnitudes(codes: Tensor) -> Tensor:
    """Return e4m3 numbers without signs, as bytes, which have the same order."""
    return codes.view(torch.uint8).bitwise_and(0x7F)


def _scales_of(exponents: Tensor) -> Tensor:
    """Return two to the power of exponents, float32: put together, not computed, so exact."""
    return exponents.int().add_(127).bitwise_left_shift_(23).view(torch.float32)


def _numbers(codes: Tensor) -> Tensor:
    """Return the numbers of codes without their scales, in a dtype that represents them exactly.

    On a CPU, PyTorch converts e4m3 one number after the other. Its exponent and mantissa are bits
    of a bfloat16, which counts its exponents from 120 further down.
    """
    if codes.is_cuda:
        return codes
    bits = codes.view(torch.uint8).to(torch.int16)
    sign = bits.bitwise_and(0x80).bitwise_left_shift_(8)
    return (
        bits.bitwise_and_(0x7F)
        .bitwise_left_shift_(4)
        .bitwise_or_(sign)
        .view(torch.bfloat16)
        .mul_(2.0**120)
    )


def _exponents(kv: Tensor) -> Tensor:
    """Return the smallest exponents whose scales bring every number of a head into range."""
    most = kv.abs().amax((-2, -1), keepdim=True) / _LARGEST
    mantissa, exponent = torch.frexp(most)
    exponent = exponent - (mantissa == 0.5).int()
    return exponent.clamp(_LEAST_EXPONENT, _MOST_EXPONENT)
