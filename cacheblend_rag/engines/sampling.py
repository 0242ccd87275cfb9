"""SamplingParams: how an answer's tokens are drawn, checked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from cacheblend_rag.errors import ConfigError


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn.

    Args:
        max_tokens: at most so many new tokens.
        temperature: 0 is greedy.
        top_p: above 0 and at most 1.
        top_k: 0 is off.
        repetition_penalty: 1 is off.
        seed: None draws one.
        stop: strings that end the answer and are cut from it.
        ignore_eos: go on past the end-of-sequence token (benchmarks).

    Raises:
        ConfigError: when a field is out of range.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop or ()
        if not isinstance(stop, Sequence) or not all(isinstance(s, str) and s for s in stop):
            raise ConfigError(f"stop={self.stop!r:.100} must hold non-empty strings")
        object.__setattr__(self, "stop", tuple(stop))
        for name in ("max_tokens", "top_k"):
            _check_number(name, getattr(self, name), whole=True)
        for name in ("temperature", "top_p", "repetition_penalty"):
            _check_number(name, getattr(self, name))
        if self.seed is not None:
            _check_number("seed", self.seed, whole=True)
        if self.max_tokens < 1:
            raise ConfigError(f"max_tokens={self.max_tokens!r} must be at least 1")
        if self.temperature < 0:
            raise ConfigError(f"temperature={self.temperature!r} must be at least 0")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p={self.top_p!r} must be above 0 and at most 1")
        if self.top_k < 0:
            raise ConfigError(f"top_k={self.top_k!r} must be at least 0")
        if self.repetition_penalty <= 0:
            raise ConfigError(f"repetition_penalty={self.repetition_penalty!r} must be above 0")


def _check_number(name: str, value: object, *, whole: bool = False) -> None:
    """Raise ConfigError unless a value is a finite number."""
    kinds = int if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not math.isfinite(value):
        kind = "a whole number" if whole else "a number"
        raise ConfigError(f"{name}={value!r:.100} must be {kind}")
