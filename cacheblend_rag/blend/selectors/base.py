"""The base class of selectors, which rank a prompt's cached tokens for recomputing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeVar

from torch import Tensor

from cacheblend_rag.settings.base import Settings

T = TypeVar("T")
KV = tuple[Tensor, Tensor]
"""Keys and values of one layer, each (kv_heads, tokens, head_dim)."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """The inputs of a selector, for the candidate tokens of one prompt, in order.

    offsets: (tokens,) int64, each token's index in its own chunk.
    prior: (tokens,) float32 stored at index time, 0 for chunks stored without one, or None.
    question_attention: (tokens,) float32, attention the question pays to each token; None for
        selectors that are no `Question`.
    fresh, cached: KV of the check layer, keys at prompt positions; None before layer 0.
    total: sums a tensor over tensor-parallel ranks; a rule that sums over heads must call it.
    """

    offsets: Tensor
    prior: Tensor | None = None
    question_attention: Tensor | None = None
    fresh: KV | None = None
    cached: KV | None = None
    total: Callable[[Tensor], Tensor] = lambda part: part

    def deviation(self, of: Literal["k", "v"]) -> Tensor:
        """Return (tokens,) float32: squared deviation of fresh from cached keys or values.

        It is summed over components and over the heads of all ranks.
        """
        which = "kv".index(of)
        fresh, cached = given(self.fresh, "fresh")[which], given(self.cached, "cached")[which]
        return self.total(squared_deviation(fresh, cached))


class Selector(Settings):
    """Base class: settings whose fields are the rule's parameters, and one method.

    needs_fresh_kv: rows are chosen at check layers; otherwise before layer 0.
    needs_prior: chunks must have been stored with a prior.
    fixed_ratio: overrides the configured recompute ratio.
    """

    _noun: ClassVar[str] = "option of a selector"
    needs_fresh_kv: ClassVar[bool] = False
    needs_prior: ClassVar[bool] = False
    fixed_ratio: ClassVar[float | None] = None

    def score(self, evidence: Evidence) -> Tensor:
        """Return (tokens,) float32 scores; the highest are recomputed, -inf never is."""
        raise TypeError(f"{type(self).__name__} must define score()")


def given(value: T | None, name: str) -> T:
    """Return an input that the selector declared it needs; its absence is a programming error."""
    if value is None:
        raise ValueError(f"evidence.{name} was not provided to a selector that needs it")
    return value


def squared_deviation(fresh: Tensor, cached: Tensor) -> Tensor:
    """Return (tokens,) float32: squared difference, summed over heads and components."""
    return (fresh.float() - cached.float()).square_().sum((0, 2))
