"""Packs chunk KV into 8-bit numbers, rounded once when it is stored.

``fp8`` is e4m3 with a scale per head, separate for keys and values. ``int8`` has a scale per
channel for keys, whose channels differ in size alike in all tokens, and a scale per token for
values (Source: KIVI, arXiv 2402.02750). All scales are powers of two. So rounded numbers are exact
in the model's own type, and rounding them again changes nothing: a chunk has the same numbers in
every tier, however often it was moved.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from cacheblend_rag.settings import Precision

CODES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
_LARGEST = {"fp8": 448.0, "int8": 127.0}
_NAN = 0x7F
_LEAST_EXPONENT, _MOST_EXPONENT = -120, 126
_HEADROOM = 15 / 16
"""Share of a dtype's largest number at which values are clamped, since rounding up overflows."""


def pack(keys: Tensor, values: Tensor, precision: Precision) -> tuple[Tensor, Tensor]:
    """Return codes and exponents of one layer.

    Args:
        keys: (kv_heads, tokens, head_dim), as all of values.
        values: of the same type.
        precision: one of those that have codes.

    Returns:
        Codes (2, kv_heads, tokens, head_dim), and the exponents of their scales, (scales,) int8, of
        keys before those of values.
    """
    kv = torch.stack((keys, values)).float()
    most = torch.finfo(keys.dtype).max * _HEADROOM
    kv = kv.clamp(-most, most)
    exponents = [_exponents(numbers, axes, precision) for numbers, axes in _parts(kv, precision)]
    scaled = torch.stack(
        [numbers * _scales_of(-own) for numbers, own in zip(kv, exponents, strict=True)]
    )
    if precision == "int8":
        scaled = scaled.round()
    codes = scaled.to(CODES[precision])
    return codes, torch.cat([own.flatten() for own in exponents]).to(torch.int8)


def unpack(
    codes: Tensor, exponents: Tensor, precision: Precision, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return keys and values, each (kv_heads, tokens, head_dim), of what ``pack`` returned."""
    return unpack_parts(codes, *part(exponents, codes.shape, precision), precision, dtype)


def unpack_parts(
    codes: Tensor, of_keys: Tensor, of_values: Tensor, precision: Precision, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """As unpack, with exponents that ``part`` returned."""
    # Exact whatever it is computed in, but that float16 has no scale so small.
    working = torch.float32 if dtype == torch.float16 else dtype
    numbers = _numbers(codes, precision).to(working)
    keys, values = (
        coded.mul_(_scales_of(own).to(working)).to(dtype)
        for coded, own in zip(numbers, (of_keys, of_values), strict=True)
    )
    return keys, values


def part(exponents: Tensor, shape: torch.Size, precision: Precision) -> tuple[Tensor, Tensor]:
    """Return a layer's exponents of keys and of values, not copied, each so that it fits them.

    exponents: (scales,). shape: of the layer's codes.
    """
    of_keys, of_values = _shapes(shape, precision)
    split = of_keys.numel()
    return exponents[:split].view(of_keys), exponents[split:].view(of_values)


def are_finite(codes: Tensor, exponents: Tensor, precision: Precision, dtype: torch.dtype) -> bool:
    """Whether codes decode to finite numbers of a dtype.

    Raises nothing, whatever bytes they are; exponents are to be ``are_written`` ones.
    """
    if precision == "fp8" and int(_magnitudes(codes).amax()) == _NAN:
        return False
    most = torch.finfo(dtype).max
    # One more than is written: an int8 may be -128.
    if math.ldexp(_LARGEST[precision] + 1, int(exponents.max())) <= most:
        return True
    parted = part(exponents, codes.shape, precision)
    for (coded, axes), own in zip(_parts(codes, precision), parted, strict=True):
        if precision == "fp8":
            extreme = _magnitudes(coded).amax(axes, keepdim=True).view(CODES["fp8"]).double()
        else:
            extreme = coded.int().abs().amax(axes, keepdim=True).double()
        if bool((torch.ldexp(extreme, own.int()) > most).any()):
            return False
    return True


def are_written(exponents: Tensor) -> bool:
    """Whether exponents are in the range that ``pack`` returns."""
    least, most = torch.aminmax(exponents)
    return int(least) >= _LEAST_EXPONENT and int(most) <= _MOST_EXPONENT


def _magnitudes(codes: Tensor) -> Tensor:
    """Return e4m3 numbers without signs, as bytes, which have the same order."""
    return codes.view(torch.uint8).bitwise_and(0x7F)


def _scales_of(exponents: Tensor) -> Tensor:
    """Return two to the power of exponents, float32: put together, not computed, so exact."""
    return exponents.int().add_(127).bitwise_left_shift_(23).view(torch.float32)


def _numbers(codes: Tensor, precision: Precision) -> Tensor:
    """Return the numbers of codes without their scales, in a dtype that represents them exactly.

    On a CPU, PyTorch converts e4m3 one number after the other. Its exponent and mantissa are bits
    of a bfloat16, which counts its exponents from 120 further down.
    """
    if precision == "int8" or codes.is_cuda:
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


def scales(kv_heads: int, tokens: int, head_dim: int, precision: Precision) -> int:
    """Return how many scales a layer has."""
    shapes = _shapes(torch.Size((2, kv_heads, tokens, head_dim)), precision)
    return sum(shape.numel() for shape in shapes)


def _shapes(codes: torch.Size, precision: Precision) -> tuple[torch.Size, torch.Size]:
    _, kv_heads, tokens, head_dim = codes
    if precision == "fp8":
        return torch.Size((kv_heads, 1, 1)), torch.Size((kv_heads, 1, 1))
    return torch.Size((kv_heads, 1, head_dim)), torch.Size((kv_heads, tokens, 1))


def _parts(kv: Tensor, precision: Precision) -> list[tuple[Tensor, tuple[int, ...]]]:
    """Return keys and values, each with the axes that share a scale."""
    axes = ((1, 2), (1, 2)) if precision == "fp8" else ((1,), (2,))
    return list(zip(kv, axes, strict=True))


def _exponents(part: Tensor, axes: tuple[int, ...], precision: Precision) -> Tensor:
    """Return the smallest exponents whose scales bring every number into range."""
    most = part.abs().amax(axes, keepdim=True) / _LARGEST[precision]
    mantissa, exponent = torch.frexp(most)
    exponent = exponent - (mantissa == 0.5).int()
    return exponent.clamp(_LEAST_EXPONENT, _MOST_EXPONENT)
