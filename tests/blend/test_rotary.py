"""Re-rotation: turning by a then b is turning by a + b, and by zero is nothing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheblend_rag.blend.rotary import (
    LAYOUTS,
    Layout,
    Rotation,
    find_layout,
    normal_table,
    rotated,
)

HEAD = 8


def turns(offset: int, pairs: int) -> tuple[torch.Tensor, torch.Tensor]:
    frequencies = 10000.0 ** (-torch.arange(pairs, dtype=torch.float64) / pairs)
    return (offset * frequencies).cos().float(), (offset * frequencies).sin().float()


def move(offset: int, pairs: int = HEAD // 2, *, interleaved: bool = False) -> Rotation:
    cos, sin = turns(offset, pairs)
    return Rotation(cos.expand(3, -1), sin.expand(3, -1), interleaved)


def keys() -> torch.Tensor:
    return torch.randn(3, 2, 5, HEAD, generator=torch.Generator().manual_seed(0))


offsets = st.integers(-4096, 4096)
widths = st.sampled_from([2, HEAD // 2])


@given(offsets, offsets, widths, st.booleans())
@settings(max_examples=50, deadline=None)
def test_rotations_add_up(first: int, second: int, pairs: int, interleaved: bool) -> None:
    one, two, both = (
        move(offset, pairs, interleaved=interleaved) for offset in (first, second, first + second)
    )
    torch.testing.assert_close(
        rotated(rotated(keys(), one), two), rotated(keys(), both), atol=1e-5, rtol=0
    )


@given(offsets, widths, st.booleans())
@settings(max_examples=25, deadline=None)
def test_each_token_may_be_moved_by_its_own_number_of_offsets(
    first: int, pairs: int, interleaved: bool
) -> None:
    own = move(1, pairs, interleaved=interleaved).per_token(first)
    by_token = [
        rotated(keys()[:, :, [token]], move(first + token, pairs, interleaved=interleaved))
        for token in range(5)
    ]
    wanted = torch.cat(by_token, 2)
    torch.testing.assert_close(rotated(keys(), own), wanted, atol=2e-3, rtol=0)
    behind = rotated(keys()[:, :, 2:], own.skipping(2))
    torch.testing.assert_close(behind, rotated(keys(), own)[:, :, 2:])
    torch.testing.assert_close(
        rotated(rotated(keys(), own), own.inverse()), keys(), atol=1e-5, rtol=0
    )


@given(offsets, st.booleans())
@settings(max_examples=25, deadline=None)
def test_it_agrees_with_complex_multiplication(offset: int, interleaved: bool) -> None:
    half = HEAD // 2
    one, other = (
        (slice(0, None, 2), slice(1, None, 2))
        if interleaved
        else (slice(0, half), slice(half, None))
    )
    plain = torch.complex(keys()[..., one].contiguous(), keys()[..., other].contiguous())
    turned = plain * torch.complex(*turns(offset, half))
    wanted = torch.empty_like(keys())
    wanted[..., one], wanted[..., other] = turned.real, turned.imag
    found = rotated(keys(), move(offset, interleaved=interleaved))
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)


def spread_out(cos: torch.Tensor, sin: torch.Tensor, layout: Layout) -> tuple[torch.Tensor, ...]:
    """The table of a model that lays its turns out so, written independently of Layout."""
    sin = -sin if layout.negated else sin
    if layout.spread == "halves":
        return cos.repeat(2), sin.repeat(2)
    if layout.spread == "doubled":
        return cos.repeat_interleave(2), sin.repeat_interleave(2)
    return cos, sin


NEAR_ENOUGH = (1e-4, 1e-4)


@pytest.mark.parametrize("pairs", [2, HEAD // 2], ids=["part", "whole"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_layout_is_found_by_what_keys_do(layout: Layout, pairs: int) -> None:
    near, offsets = keys()[:1], (37, 1000)
    far = [rotated(near, move(by, pairs, interleaved=layout.interleaved).of(0)) for by in offsets]
    tables = [spread_out(*turns(by, pairs), layout) for by in offsets]
    found = find_layout(tables, near, far, NEAR_ENOUGH)
    assert isinstance(found, Layout)
    for table, there in zip(tables, far, strict=True):
        moved = rotated(near, found.move(*table))
        torch.testing.assert_close(moved, there, atol=1e-4, rtol=0)


def test_keys_that_stay_have_no_layout_and_odd_ones_are_unknown() -> None:
    near = keys()[:1]
    tables = [turns(by, HEAD // 2) for by in (37, 1000)]
    assert find_layout(tables, near, [near, near], NEAR_ENOUGH) is None
    assert find_layout([], near, [near + 1.0], [1e-4]) == "unknown"
    one_only = [rotated(near, move(37).of(0)), near]
    assert find_layout(tables, near, one_only, NEAR_ENOUGH) == "unknown"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("turned", [True, False])
def test_a_pair_with_large_biases_hides_no_other(dtype: torch.dtype, turned: bool) -> None:
    """The slowest pair turns by a hundredth of it in between, which is more than the others are."""
    near, offsets = keys()[:1], (100, 1000)
    near[..., HEAD // 2 - 1], near[..., HEAD - 1] = 300.0, -300.0
    tables = [turns(by, HEAD // 2) for by in offsets]
    layout = Layout(interleaved=False, spread="pairs")
    far = [rotated(near, layout.move(*table)) if turned else near for table in tables]
    tolerances = [5 * torch.finfo(dtype).eps + 1e-4] * 2
    far = [there.to(dtype) for there in far]
    found = find_layout(tables, near.to(dtype), far, tolerances)
    assert found == (Layout(interleaved=False, spread="halves") if turned else None) or (
        found == layout and turned
    )
    wrong = [there.clone() for there in far]
    wrong[1][..., 0] *= -1
    assert find_layout(tables, near.to(dtype), wrong, tolerances) == "unknown"


def test_layers_without_rotary_stay_among_those_that_turn() -> None:
    layout = Layout(interleaved=False, spread="pairs")
    table = turns(500, HEAD // 2)
    by = Rotation.over_tables([table, table, table], [layout, None, layout])
    moved = rotated(keys(), by)
    assert torch.equal(moved[1], keys()[1])
    torch.testing.assert_close(moved[0], rotated(keys(), move(500))[0])
    torch.testing.assert_close(moved[2], rotated(keys(), move(500))[2])
    still = Rotation.over_tables([table] * 3, [None] * 3)
    assert torch.equal(rotated(keys(), still), keys())


def test_a_table_is_read_as_it_is_handed_without_its_magnitude() -> None:
    """Of several rows, as a batch or as positions, the first; as cos and sin, or as e^ix."""
    cos, sin = turns(7, 5)
    rows = torch.stack([torch.stack([cos, sin]), torch.randn(2, 5)], dim=1)
    for handed in (
        (cos, sin),
        [1.5 * cos[None, None], 1.5 * sin[None, None]],
        (rows[0][:, None], rows[1][:, None]),
        torch.complex(2 * cos, 2 * sin)[None],
        (cos.bfloat16(), sin.bfloat16()),
    ):
        found = normal_table(handed)
        assert found is not None
        for part, wanted in zip(found, (cos, sin), strict=True):
            assert part.dtype == torch.float32
            torch.testing.assert_close(part, wanted, atol=0.01, rtol=0)
    for strange in (None, cos, (cos,), (cos, sin, cos), 3):
        assert normal_table(strange) is None
