"""Re-rotation: turning by a then b is turning by a + b, and by zero is nothing."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheblend_rag.blend.rotary import rotated

HEAD = 8


def table(offset: int, rotary: int) -> tuple[torch.Tensor, torch.Tensor]:
    frequencies = 10000.0 ** (-torch.arange(0, rotary, 2, dtype=torch.float64) / rotary)
    angle = torch.cat([offset * frequencies] * 2)[None].expand(3, -1)
    return angle.cos().float(), angle.sin().float()


def keys() -> torch.Tensor:
    return torch.randn(3, 2, 5, HEAD, generator=torch.Generator().manual_seed(0))


offsets = st.integers(-4096, 4096)


@given(offsets, offsets, st.sampled_from([4, HEAD]))
@settings(max_examples=50, deadline=None)
def test_rotations_add_up(first: int, second: int, rotary: int) -> None:
    twice = rotated(rotated(keys(), *table(first, rotary)), *table(second, rotary))
    once = rotated(keys(), *table(first + second, rotary))
    torch.testing.assert_close(twice, once, atol=1e-5, rtol=0)


@given(offsets, st.sampled_from([4, HEAD]))
@settings(max_examples=50, deadline=None)
def test_a_rotation_keeps_lengths_and_what_is_not_rotary(offset: int, rotary: int) -> None:
    moved = rotated(keys(), *table(offset, rotary))
    torch.testing.assert_close(moved.norm(dim=-1), keys().norm(dim=-1), atol=1e-5, rtol=0)
    assert torch.equal(moved[..., rotary:], keys()[..., rotary:])


@given(offsets)
@settings(max_examples=25, deadline=None)
def test_it_agrees_with_complex_multiplication(offset: int) -> None:
    half = HEAD // 2
    plain = torch.complex(keys()[..., :half], keys()[..., half:])
    cos, sin = table(offset, HEAD)
    turned = plain * torch.complex(cos, sin)[:, None, None, :half]
    wanted = torch.cat([turned.real, turned.imag], -1)
    torch.testing.assert_close(rotated(keys(), cos, sin), wanted, atol=1e-5, rtol=0)


def test_half_precision_is_turned_in_float32() -> None:
    half = keys().bfloat16()
    wanted = rotated(half.float(), *table(777, HEAD)).bfloat16()
    assert torch.equal(rotated(half, *table(777, HEAD)), wanted)
