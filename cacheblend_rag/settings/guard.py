"""GuardConfig: when production answers are compared with full prefill, and what follows."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, BeforeValidator, Field

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.settings.base import Positive, Ratio, Settings, as_tuple

Share = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]


def _rising(ratios: tuple[float, ...]) -> tuple[float, ...]:
    if any(b <= a for a, b in pairwise(ratios)):
        raise ConfigError(f"ratios={ratios} must rise strictly")
    return ratios


class GuardConfig(Settings):
    """How an engine watches the quality of its blended answers, and what it does about it."""

    _noun: ClassVar[str] = "setting of a guard"

    sample_share: Share = 0.01
    """Share of blended answers that are compared with full prefill, in idle time."""
    limit: Annotated[float, Field(gt=0, le=3)] = 0.1
    """Divergence from full prefill that is too much, in nats per token of the answer."""
    ratios: Annotated[
        tuple[Ratio, ...],
        BeforeValidator(as_tuple),
        AfterValidator(_rising),
    ] = (0.3, 0.5)
    """Least recompute ratios, tried one after another while the divergence is above the limit;
    after the last one blending stops."""
    answer_tokens: Positive = 16
    """How many of an answer's first tokens are compared."""
    most_waiting: Positive = 8
    """Most sampled requests that wait in memory for idle time; further ones are dropped."""
    most_tokens: Positive = 16384
    """Longest prompt that is compared, in tokens, with the documents' texts that its chunks were
    computed after."""

    @classmethod
    def of(cls, value: GuardConfig | Mapping[str, Any] | float | None) -> Self:
        """As for all settings; a number is the share of answers."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            return super().of(value)  # type: ignore[arg-type]
        if not 0 < value <= 1:
            raise ConfigError(
                f"guard={value!r} must be a share of answers, above 0 and up to 1, or settings"
            )
        return cls(sample_share=float(value))
