"""Ranks tokens by the deviation of their fresh KV from the cached KV at the check layer (HKVD)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from cacheblend_rag.blend.selectors.base import Evidence, Selector, given
from cacheblend_rag.errors import ConfigError

Deviation = Literal["v", "k"]


@dataclass(frozen=True)
class HKVD(Selector):
    """Squared deviation of V or K. Source: arXiv 2405.16444."""

    needs_fresh_kv: ClassVar[bool] = True
    deviation: Deviation = "v"

    def __post_init__(self) -> None:
        if self.deviation not in ("v", "k"):
            raise ConfigError(f"deviation={self.deviation!r} must be one of v, k")

    def score(self, evidence: Evidence) -> Tensor:
        return _values(evidence) if self.deviation == "v" else _keys(evidence)


def _keys(e: Evidence) -> Tensor:
    return e.total(
        squared_deviation(given(e.fresh_keys, "fresh_keys"), given(e.cached_keys, "cached_keys"))
    )


def _values(e: Evidence) -> Tensor:
    return e.total(
        squared_deviation(
            given(e.fresh_values, "fresh_values"), given(e.cached_values, "cached_values")
        )
    )


def deviations_of(evidence: Evidence) -> tuple[Tensor, Tensor]:
    """Return the squared deviations of keys and of values, each (tokens,) float32."""
    return _keys(evidence), _values(evidence)


def squared_deviation(fresh: Tensor, cached: Tensor) -> Tensor:
    """Return (tokens,) float32: squared difference, summed over heads and components."""
    return (fresh.float() - cached.float()).square_().sum((0, 2))
