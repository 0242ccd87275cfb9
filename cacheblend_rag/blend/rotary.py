"""Re-rotates cached keys from the positions where they were computed to new positions.

A rotary embedding rotates each pair of key components by position x frequency, so moving a key by
an offset is one more rotation by offset x frequency, the same for every token of a chunk. Source:
RoFormer (arXiv 2104.09864); its use on cached chunks: CacheBlend (arXiv 2405.16444).

Which components form a pair, and how a model stores its table of cos and sin, differs between
families. A `Layout` says both; `find_layout` finds it by comparing the model's own keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any, Literal

import torch
from torch import Tensor

Spread = Literal["pairs", "halves", "doubled"]
"""A table's entries: one angle per pair; all angles twice; or each angle twice in a row."""


@dataclass(frozen=True, slots=True)
class Rotation:
    """The rotation that moves keys by one offset.

    cos, sin: (layers, pairs) float32; a layer without rotary has angles of 0. interleaved:
    component 2i forms a pair with 2i + 1, otherwise i with i + pairs. first: None rotates every
    token by the offset; otherwise token i is rotated by ``first + i`` times the offset.
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool = False
    first: int | None = None

    @classmethod
    def over_tables(
        cls, tables: Sequence[Table | None], layouts: Sequence[Layout | None] | None
    ) -> Rotation:
        """Return the rotation of all layers' keys, given each layer's table and layout."""
        if layouts is None:
            raise RuntimeError("the rotary layouts are not known yet: call find_layouts")
        moved = cache(Layout.move)  # once for all layers of a kind
        moves = [
            moved(layout, *table) if layout and table else None
            for table, layout in zip(tables, layouts, strict=True)
        ]
        known = next((move for move in moves if move), None)
        if known is None:
            nothing = torch.empty(len(moves), 0)
            return cls(nothing, nothing)
        still = cls(torch.ones_like(known.cos), torch.zeros_like(known.sin))
        of_layers = [move or still for move in moves]
        cos, sin = (torch.cat([getattr(one, part) for one in of_layers]) for part in ("cos", "sin"))
        return cls(cos, sin, known.interleaved)

    def of(self, layer: int) -> Rotation:
        """Return the rotation of one layer's keys."""
        here = slice(layer, layer + 1)
        return replace(self, cos=self.cos[here], sin=self.sin[here])

    def inverse(self) -> Rotation:
        """Return the rotation that undoes this one."""
        return replace(self, sin=-self.sin)

    def per_token(self, first: int) -> Rotation:
        """Return the rotation of token i by ``first + i`` times this offset."""
        return replace(self, first=first)

    def skipping(self, tokens: int) -> Rotation:
        """Return the rotation for a sequence without its first ``tokens`` tokens."""
        return self if self.first is None else self.per_token(self.first + tokens)

    def tables(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Return cos and sin for a sequence of ``tokens`` tokens.

        Each is (layers, 1, 1 or tokens, pairs) float32: 1 if all tokens have the same angle.
        """
        cos, sin = self.cos[:, None, None], self.sin[:, None, None]
        if self.first is None:
            return cos, sin
        offsets = torch.arange(self.first, self.first + tokens, device=cos.device)
        angles = torch.atan2(sin.double(), cos.double()) * offsets[:, None]
        return angles.cos().float(), angles.sin().float()


@dataclass(frozen=True, slots=True)
class Layout:
    """How one layer rotates its keys. interleaved: see Rotation. negated: it rotates backwards."""

    interleaved: bool
    spread: Spread
    negated: bool = False

    def move(self, cos: Tensor, sin: Tensor) -> Rotation:
        """Return the rotation of one layer's keys by the offset of its table (entries,)."""
        picked = {
            "pairs": slice(None),
            "halves": slice(0, cos.numel() // 2),
            "doubled": slice(0, None, 2),
        }[self.spread]
        sin = -sin if self.negated else sin
        return Rotation(cos[None, picked], sin[None, picked], self.interleaved)


SPREADS: tuple[Spread, ...] = ("halves", "doubled", "pairs")
LAYOUTS = tuple(
    Layout(interleaved, spread, negated)
    for negated, interleaved, spread in product((False, True), (False, True), SPREADS)
)

LEAST_PAIR = 0.01
"""Share of the median pair's size: smaller pairs are compared relative to it."""

Table = tuple[Tensor, Tensor]
"""cos and sin, (entries,) float32, as a layer gets them for one position."""


def normal_table(handed: Any) -> Table | None:
    """Read a table in the form that layers get it: (cos, sin), or e^ix, for one position.

    cos and sin, (..., entries). Returns them as (entries,) float32 without the magnitude that some
    rotary schemes scale them by; None if it is no such table.
    """
    if isinstance(handed, Tensor) and handed.is_complex():
        handed = (handed.real, handed.imag)
    if not isinstance(handed, Sequence) or len(handed) != 2:
        return None
    cos, sin = (part.reshape(-1, part.shape[-1])[0].float() for part in handed)
    magnitude = (cos.square() + sin.square()).sqrt()
    return cos / magnitude, sin / magnitude


def find_layout(
    tables: Sequence[Table], near: Tensor, far: Sequence[Tensor], tolerances: Sequence[float]
) -> Layout | Literal["unknown"] | None:
    """Return how a layer rotates its keys, None if it does not, or "unknown".

    tables: the layer's, one for each offset, or none. near: keys (1, kv_heads, tokens, head_dim)
    at small positions. far: keys of the same hidden states, by offset to larger positions.
    tolerances: for each offset, see ``turns_into``.
    """
    for layout in LAYOUTS if tables else ():
        moves = [layout.move(*table) for table in tables]
        if 2 * moves[0].cos.shape[-1] <= near.shape[-1] and all(
            turns_into(near, there, by, tolerance)
            for by, there, tolerance in zip(moves, far, tolerances, strict=True)
        ):
            return layout
    if all(turns_into(near, there, None, by) for there, by in zip(far, tolerances, strict=True)):
        return None
    return "unknown"


def turns_into(near: Tensor, far: Tensor, by: Rotation | None, tolerance: float) -> bool:
    """Whether keys or queries, (1, heads, tokens, head_dim), are ``near`` rotated by ``by``.

    tolerance: the largest difference of a pair of components, relative to the pair's own size,
    so that a few large components (key biases, say) do not hide differences of the others.
    """
    moved = near if by is None else rotated(near, by)
    off, size = (pair_sizes(part, by) for part in (moved.float() - far.float(), far.float()))
    least = LEAST_PAIR * size.median(-1, keepdim=True).values
    return bool((off <= tolerance * size.maximum(least).clamp(min=1e-6)).all())


def pair_sizes(part: Tensor, by: Rotation | None) -> Tensor:
    """Return the length of each pair of components, and the size of unpaired components."""
    pairs = 0 if by is None else by.cos.shape[-1]
    one, other = _places(pairs, interleaved=by is not None and by.interleaved)
    rest = part[..., 2 * pairs :].abs()
    return torch.cat((torch.hypot(part[..., one], part[..., other]), rest), -1)


def rotate_into(out: Tensor, keys: Tensor, by: Rotation) -> None:
    """Write ``keys`` rotated by ``by`` into ``out``; computed in float32.

    out, keys: (layers, kv_heads, tokens, head_dim). Unpaired components are copied.
    """
    pairs = by.cos.shape[-1]
    if pairs == 0:
        out.copy_(keys)
        return
    cos, sin = by.tables(keys.shape[-2])
    one, other = _places(pairs, interleaved=by.interleaved)
    first, second = keys[..., one].float(), keys[..., other].float()
    torch.addcmul(first * cos, second, sin, value=-1, out=out[..., one])
    torch.addcmul(second * cos, first, sin, out=out[..., other])
    if 2 * pairs < keys.shape[-1]:
        out[..., 2 * pairs :] = keys[..., 2 * pairs :]


def rotated(keys: Tensor, by: Rotation) -> Tensor:
    """Return ``keys`` (layers, kv_heads, tokens, head_dim) rotated by ``by``, same dtype."""
    out = torch.empty_like(keys)
    rotate_into(out, keys, by)
    return out


def _places(pairs: int, *, interleaved: bool) -> tuple[slice, slice]:
    """Return the slices of the first and the second components of all pairs."""
    if interleaved:
        return slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)
    return slice(0, pairs), slice(pairs, 2 * pairs)
