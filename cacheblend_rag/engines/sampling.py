"""Validated sampling parameters of an answer."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from cacheblend_rag.engines.structured import StructuredOutputs
from cacheblend_rag.errors import ConfigError

MOST_LOGPROBS = 20
"""As many alternatives as vLLM and the OpenAI API tell of by default."""
LONGEST_STOP = 4096
"""Characters of a stop string."""
SEED_LIMIT = 1 << 63
"""Seeds are 64-bit signed integers, in PyTorch as in vLLM's API."""


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are sampled.

    ``temperature``, ``top_p``, ``top_k``, ``min_p`` and ``repetition_penalty`` take the value of
    the model's ``generation_config`` if they are None, as in Hugging Face's ``generate``: a
    model is greedy unless its ``generation_config`` has ``do_sample=true`` or a temperature above 0
    is given here.

    Args:
        max_tokens: at most so many new tokens; the model's ``max_new_tokens`` is not read.
        temperature: 0 is greedy.
        top_p: above 0 and at most 1, which is off.
        top_k: 0 is off.
        min_p: from 0, which is off, to 1.
        repetition_penalty: 1 is off; tokens of the prompt count as repeated, too.
        seed: None is a random one.
        stop: strings that end the answer and are cut from it, of at most 4,096 characters each.
        ignore_eos: go on past the end-of-sequence token (benchmarks).
        presence_penalty: from -2 to 2; taken off the logit of each token that the answer already
            has. 0 is off. Tokens of the prompt do not count, here and in the next one.
        frequency_penalty: from -2 to 2; the same, times how often the answer has the token.
        logprobs: also tell the log-probability of each token of the answer, and of this many of
            the most likely tokens in its place (0 to 20); None tells none.
        structured_outputs: the form that the answer must have; None is free text.

    Raises:
        ConfigError: when a field is out of range.
    """

    max_tokens: int = 256
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logprobs: int | None = None
    structured_outputs: StructuredOutputs | None = None

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop or ()
        if not isinstance(stop, Sequence) or not all(isinstance(s, str) and s for s in stop):
            raise ConfigError(f"stop={self.stop!r:.100} must hold non-empty strings")
        if any(len(s) > LONGEST_STOP for s in stop):
            raise ConfigError(
                f"stop={self.stop!r:.100} must hold strings of at most {LONGEST_STOP} characters"
            )
        object.__setattr__(self, "stop", tuple(stop))
        _check_number("max_tokens", self.max_tokens, whole=True)
        if self.max_tokens < 1:
            raise ConfigError(f"max_tokens={self.max_tokens!r} must be at least 1")
        if self.seed is not None:
            _check_number("seed", self.seed, whole=True)
            if not -SEED_LIMIT <= self.seed < SEED_LIMIT:
                raise ConfigError(f"seed={self.seed!r:.100} must be a 64-bit integer")
        for name in ("presence_penalty", "frequency_penalty"):
            _check_number(name, getattr(self, name))
            if not -2 <= getattr(self, name) <= 2:
                raise ConfigError(f"{name}={getattr(self, name)!r} must be from -2 to 2")
        if self.logprobs is not None:
            _check_number("logprobs", self.logprobs, whole=True)
            if not 0 <= self.logprobs <= MOST_LOGPROBS:
                raise ConfigError(f"logprobs={self.logprobs!r:.100} must be 0 to {MOST_LOGPROBS}")
        asked = self.structured_outputs
        if asked is not None and not isinstance(asked, StructuredOutputs):
            raise ConfigError(
                f"structured_outputs={asked!r:.100} must be StructuredOutputs(json=...), say"
            )
        for name in DRAWING_FIELDS:
            if getattr(self, name) is not None:
                check_drawing_field(name, getattr(self, name))

    @classmethod
    def greedy(cls, max_tokens: int = 256, **more: Any) -> Self:
        """Return settings that take the most likely token whatever the model's own settings say.

        Comparisons use them: the same logits give the same answer.

        Args:
            max_tokens: at most so many new tokens.
            more: ``stop`` or ``ignore_eos``.

        Raises:
            ConfigError: when a field is out of range.
        """
        return cls(max_tokens, temperature=0.0, repetition_penalty=1.0, **more)


@dataclass(frozen=True)
class ResolvedSampling(SamplingParams):
    """The complete settings of an answer, without defaults from the model. Greedy by default."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


DRAWING_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""The fields that a model's ``generation_config`` may set."""


def check_drawing_field(name: str, value: Any) -> None:
    """Raise ConfigError unless ``value`` is in the range of the field ``name``."""
    _check_number(name, value, whole=name == "top_k")
    if name in {"temperature", "top_k"} and value < 0:
        raise ConfigError(f"{name}={value!r} must be at least 0")
    if name == "top_p" and not 0 < value <= 1:
        raise ConfigError(f"top_p={value!r} must be above 0 and at most 1")
    if name == "min_p" and not 0 <= value <= 1:
        raise ConfigError(f"min_p={value!r} must be at least 0 and at most 1")
    if name == "repetition_penalty" and value <= 0:
        raise ConfigError(f"repetition_penalty={value!r} must be above 0")


LARGEST = sys.float_info.max
"""The largest float; Python cannot convert a larger whole number to one."""


def _check_number(name: str, value: object, *, whole: bool = False) -> None:
    """Raise ConfigError unless a value is a finite number."""
    kinds = int if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not abs(value) <= LARGEST:
        kind = "a whole number" if whole else "a number"
        raise ConfigError(f"{name}={value!r:.100} must be {kind}")
