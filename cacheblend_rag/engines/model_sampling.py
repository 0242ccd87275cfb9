"""The sampling settings of a model's own generation_config."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from cacheblend_rag.engines.sampling import (
    DRAWING_FIELDS,
    ResolvedSampling,
    SamplingParams,
    check_drawing_field,
)
from cacheblend_rag.errors import ConfigError

logger = logging.getLogger(__name__)

UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "penalty_alpha": (0,),
    "typical_p": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "top_h": (),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "exponential_decay_length_penalty": (),
    "guidance_scale": (1,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "bad_words_ids": ([],),
    "sequence_bias": ({}, []),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "stop_strings": ([], ""),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "watermarking_config": (),
}
"""Fields that change an answer and that no engine here follows, each with the values that turn it
off: transformers' own, and two that vLLM reads."""


@dataclass(frozen=True)
class ModelSampling:
    """A model's own sampling settings: SamplingParams fields that are None take them.

    The defaults are those of Hugging Face's ``generate``, for what a ``generation_config`` leaves
    out.

    Args:
        do_sample: whether tokens are sampled if no temperature is given.
        temperature: see SamplingParams, as for the other fields.
        top_p: the same.
        top_k: the same.
        min_p: the same.
        repetition_penalty: the same; greedy answers follow it, too.

    Raises:
        ConfigError: when a field is out of range.
    """

    do_sample: bool = False
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 50
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        for field in fields(self):
            if problem := _problem(field.name, getattr(self, field.name)):
                raise ConfigError(problem)

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """Read the fields of a GenerationConfig; a field that is wrong counts as left out."""
        found = {field.name: values.get(field.name) for field in fields(cls)}
        return cls(
            **{
                name: value
                for name, value in found.items()
                if value is not None and _problem(name, value) is None
            }
        )

    def resolve(self, asked: SamplingParams) -> ResolvedSampling:
        """Return the settings for an answer: those given, the model's for the rest."""
        own = {name: getattr(self, name) for name in DRAWING_FIELDS}
        own["temperature"] = self.temperature if self.do_sample else 0.0
        given = {field.name: getattr(asked, field.name) for field in fields(asked)}
        told = {name: value for name, value in given.items() if value is not None}
        return ResolvedSampling(**{**own, **told})


def ignored_settings(values: Mapping[str, Any]) -> list[str]:
    """Return the fields of a GenerationConfig that are ignored, with reasons, one text each."""
    given = {name: value for name, value in values.items() if value is not None}
    names = [field.name for field in fields(ModelSampling) if field.name in given]
    wrong = [_problem(name, given[name]) for name in names]
    unsupported = [
        f"{name}={given[name]!r:.60} is not supported"
        for name, off in UNSUPPORTED.items()
        if name in given and given[name] not in off
    ]
    return [*filter(None, wrong), *unsupported]


def warn_of_ignored(values: Mapping[str, Any]) -> None:
    """Log one line if fields of a GenerationConfig are ignored."""
    if ignored := ignored_settings(values):
        logger.warning("ignored in the model's generation_config: %s", "; ".join(ignored))


def _problem(name: str, value: Any) -> str | None:
    """Return why a ModelSampling field cannot have this value, or None when it can."""
    if name == "do_sample":
        return (
            None if isinstance(value, bool) else f"do_sample={value!r:.100} must be true or false"
        )
    try:
        check_drawing_field(name, value)
    except ConfigError as error:
        return str(error)
    return None
