"""Quantizes chunk KV to fp8 (e4m3) or int4 once, when it is stored, and dequantizes it.

``FORMATS`` has an object for each precision, with the same methods.

fp8: each head has a scale, separate for keys and values. All scales are powers of two. So rounded
numbers are exact in the model's own dtype, and quantizing them again changes nothing.

int4: KIVI (arXiv 2402.02750) quantizes keys per channel and values per token. Here both are
normalized per channel, then quantized per token and head, so that each row of codes can be
dequantized alone. Keys must be rotated for position 0: the bias of a key projection is constant per
channel there, and is rotated with the position elsewhere.

A chunk stays quantized wherever it is kept: it has the same numbers in every tier.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from cacheblend_rag.settings import Precision


class Fp8:
    """One byte per number; one scale per head, stored as exponents, (2 * kv_heads,) per layer.

    codes, scales: the dtypes in which they are stored.
    """

    codes, scales = torch.float8_e4m3fn, torch.int8
    _LARGEST, _NAN = 448.0, 0x7F
    _LEAST_EXPONENT, _MOST_EXPONENT = -120, 126
    _HEADROOM = 15 / 16
    """Share of a dtype's largest number at which numbers are clamped: rounding up overflows."""

    def row(self, head_dim: int) -> int:
        """Return how many codes one token's key or value of one head takes: a row."""
        return head_dim

    def head_dim(self, row: int) -> int:
        """Return the head_dim whose ``row`` this is."""
        return row

    def scales_shape(self, kv_heads: int, head_dim: int) -> tuple[int, ...]:
        """Return the shape of the tensor of one layer's scales."""
        return (2 * kv_heads,)

    def pack(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Quantize one layer; return its codes, (2, kv_heads, tokens, row), and its scales.

        numbers: (2, kv_heads, tokens, head_dim), keys before values.
        """
        most = torch.finfo(numbers.dtype).max * self._HEADROOM
        kv = numbers.float().clamp(-most, most)
        mantissa, exponents = torch.frexp(kv.abs().amax((-2, -1), keepdim=True) / self._LARGEST)
        exponents = exponents - (mantissa == 0.5).int()
        exponents = exponents.clamp(self._LEAST_EXPONENT, self._MOST_EXPONENT)
        codes = (kv * _two_to_the(-exponents)).to(self.codes)
        return codes, exponents.flatten().to(self.scales)

    def unpack(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """Dequantize what ``pack`` returned, of one layer or of several in one tensor."""
        # Exact whatever it is computed in, but that float16 has no scale so small.
        working = torch.float32 if dtype == torch.float16 else dtype
        by_head = _two_to_the(self._by_head(codes, scales)).to(working)
        return _of_e4m3(codes).to(working).mul_(by_head).to(dtype)

    def are_finite(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> bool:
        """Whether all codes dequantize to finite numbers of ``dtype``.

        Raises nothing, whatever bytes the codes are; scales must pass ``are_written``.
        """
        magnitudes = codes.view(torch.uint8).bitwise_and(0x7F)  # without signs: in the same order
        if int(magnitudes.amax()) == self._NAN:
            return False
        most = torch.finfo(dtype).max
        if math.ldexp(self._LARGEST, int(scales.max())) <= most:
            return True
        extremes = magnitudes.amax((-2, -1), keepdim=True).view(self.codes).double()
        return not bool((torch.ldexp(extremes, self._by_head(codes, scales).int()) > most).any())

    def are_written(self, scales: Tensor) -> bool:
        """Whether all scales are in ``pack``'s range; others mean a damaged or forged object."""
        least, most = torch.aminmax(scales)
        return int(least) >= self._LEAST_EXPONENT and int(most) <= self._MOST_EXPONENT

    def _by_head(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Return each head's exponent, as a view that broadcasts over the codes."""
        return scales.view(*codes.shape[:-2], 1, 1)


class Int4:
    """4 bits per number on average, and 4 bytes per row; methods as those of Fp8.

    A byte holds a key's code in its high 5 bits, and in its low 3 that of the value of the same
    channel: attention is more sensitive to errors in keys. The rows of keys hold the first half of
    these bytes, the rows of values the second. A row ends with its minimum and step size, two
    bfloat16. The scales, (2 * kv_heads, 2, head_dim) per layer, are each channel's median and
    spread: a number is (minimum + code * step) * spread + median.
    """

    codes, scales = torch.uint8, torch.bfloat16
    _TAIL, _VALUE_BITS = 4, 3
    _TOPS = 31, 7
    _LEAST, _MOST = 2.0**-60, 2.0**60
    """Range of scales in which no product of theirs overflows."""

    def row(self, head_dim: int) -> int:
        return head_dim // 2 + self._TAIL

    def head_dim(self, row: int) -> int:
        return 2 * (row - self._TAIL)

    def scales_shape(self, kv_heads: int, head_dim: int) -> tuple[int, ...]:
        return 2 * kv_heads, 2, head_dim

    def pack(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        if numbers.shape[-1] % 2:
            raise ValueError(
                f"head_dim={numbers.shape[-1]} is odd, which precision='int4' cannot store: use fp8"
            )
        kv = numbers.float().clamp(-self._MOST / 32, self._MOST / 32)  # no model's are as large
        middle = kv.median(-2, keepdim=True).values.to(self.scales)
        away = (kv - middle).abs()
        # The third quartile, as one outlying token, such as an attention sink, must not move the
        # scale of all others; not 0 if most tokens are alike.
        quartile = away.kthvalue(-(-3 * kv.shape[-2] // 4), -2, keepdim=True).values
        deviation = quartile.maximum(away.mean(-2, keepdim=True) / 1024)
        deviation = deviation.clamp(min=self._LEAST).to(self.scales)
        kv = (kv - middle) / deviation
        least, most = kv.aminmax(dim=-1, keepdim=True)
        least = least.to(self.scales)
        tops = torch.tensor(self._TOPS, device=kv.device).view(2, 1, 1, 1)
        step = ((most - least) / tops).clamp(min=self._LEAST).to(self.scales)
        steps = ((kv - least) / step).round().clamp(min=0).minimum(tops)
        keys, values = steps.to(torch.uint8)
        halves = torch.stack((keys << self._VALUE_BITS | values).chunk(2, -1))
        tail = torch.cat((least, step), -1).view(torch.uint8)
        scales = torch.cat((middle, deviation), -2).flatten(0, 1)
        return torch.cat((halves, tail), -1), scales

    def unpack(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        least, step = self._tail(codes).chunk(2, -1)
        both = torch.cat(codes[..., : -self._TAIL].unbind(-4), -1)
        steps = torch.stack((both >> self._VALUE_BITS, both & self._TOPS[1]), -4)
        kv = steps.float().mul_(step).add_(least)
        middle, deviation = scales.view(*codes.shape[:-2], 2, 1, -1).float().unbind(-3)
        most = torch.finfo(dtype).max
        return kv.mul_(deviation).add_(middle).clamp_(-most, most).to(dtype)

    def are_finite(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> bool:
        return self.are_written(self._tail(codes))

    def are_written(self, scales: Tensor) -> bool:
        return bool((scales.abs() <= self._MOST).all())

    def _tail(self, codes: Tensor) -> Tensor:
        """Return each row's minimum and step size, (..., tokens, 2) bfloat16."""
        return codes[..., -self._TAIL :].contiguous().view(self.scales)


FORMATS: Mapping[str, Fp8 | Int4] = {"fp8": Fp8(), "int4": Int4()}


def precision_of(codes: torch.dtype) -> Precision:
    """Return the precision whose codes have this dtype; ``native`` for any other dtype."""
    names: tuple[Precision, ...] = ("fp8", "int4")
    return next((name for name in names if FORMATS[name].codes == codes), "native")


def head_dim_of(precision: str, row: int) -> int:
    """Return the head_dim of a stored row of ``row`` elements; below 1 if no row has that many."""
    return FORMATS[precision].head_dim(row) if precision in FORMATS else row


def _two_to_the(exponents: Tensor) -> Tensor:
    """Return two to the power of exponents, float32: put together, not computed, so exact."""
    return exponents.int().add_(127).bitwise_left_shift_(23).view(torch.float32)


def _of_e4m3(codes: Tensor) -> Tensor:
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
