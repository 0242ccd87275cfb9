"""The base class of selectors, which rank a prompt's cached tokens for recomputing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from cacheblend_rag.blend.selectors.probe import Probe


def _alone(part: Tensor) -> Tensor:
    return part


@dataclass(frozen=True, slots=True)
class Evidence:
    """The inputs of a selector, for the candidate tokens of one prompt, in order.

    offsets: (tokens,) int64, each token's index in its own chunk.
    prior: (tokens,) float32 stored at index time, 0 for chunks stored without one, or None.
    question_attention: (tokens,) float32, attention the question pays to each token, or None.
    fresh_keys, fresh_values, cached_keys, cached_values: (kv_heads, tokens, head_dim) at a check
        layer, keys at prompt positions; None before layer 0.
    total: sums a tensor over tensor-parallel ranks; a rule that sums over heads must call it.
    """

    offsets: Tensor
    prior: Tensor | None = None
    question_attention: Tensor | None = None
    fresh_keys: Tensor | None = None
    fresh_values: Tensor | None = None
    cached_keys: Tensor | None = None
    cached_values: Tensor | None = None
    total: Callable[[Tensor], Tensor] = _alone


@dataclass(frozen=True)
class Selector:
    """Base class: a dataclass whose fields are the rule's parameters, and one method.

    needs_fresh_kv: rows are chosen at check layers; otherwise before layer 0.
    needs_question: the engine runs a question-only probe pass first.
    needs_prior: chunks must have been stored with a prior.
    fixed_ratio: overrides the configured recompute ratio.
    """

    needs_fresh_kv: ClassVar[bool] = False
    needs_question: ClassVar[bool] = False
    needs_prior: ClassVar[bool] = False
    fixed_ratio: ClassVar[float | None] = None

    @property
    def probe(self) -> Probe:
        """What the probe pass observes, if ``needs_question``."""
        return Probe()

    def score(self, evidence: Evidence) -> Tensor:
        """Return (tokens,) float32 scores; the highest are recomputed, -inf never is."""
        raise TypeError(f"{type(self).__name__} must define score()")


def given(tensor: Tensor | None, name: str) -> Tensor:
    """Return an input that the selector declared it needs; its absence is a programming error."""
    if tensor is None:
        raise ValueError(f"evidence.{name} was not provided to a selector that needs it")
    return tensor
