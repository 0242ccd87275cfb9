"""How an answer's tokens are sampled: what a request asks for, and a model's own settings."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, Self, TypeVar, cast, dataclass_transform

from pydantic import BeforeValidator, ConfigDict, Field, InstanceOf, StrictBool, ValidationError
from pydantic.dataclasses import dataclass

from cacheblend_rag.engines.structured import StructuredOutputs
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.settings.base import as_tuple
from cacheblend_rag.settings.options import described

logger = logging.getLogger(__name__)

T = TypeVar("T")

MOST_LOGPROBS = 20
"""As many alternatives as vLLM and the OpenAI API tell of by default."""
LONGEST_STOP = 4096
"""Characters of a stop string."""
SEED_LIMIT = 1 << 63
"""Seeds are 64-bit signed integers, in PyTorch as in vLLM's API."""

Number = Annotated[float, Field(strict=True)]
Whole = Annotated[int, Field(strict=True)]
Temperature = Annotated[Number, Field(ge=0)]
TopP = Annotated[Number, Field(gt=0, le=1)]
TopK = Annotated[Whole, Field(ge=0)]
MinP = Annotated[Number, Field(ge=0, le=1)]
Repetition = Annotated[Number, Field(gt=0)]
Penalty = Annotated[Number, Field(ge=-2, le=2)]
Stop = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP, strict=True)]


@dataclass_transform(frozen_default=True)
def checked(of: type[T]) -> type[T]:
    """Make a frozen dataclass of a class; pydantic checks its fields, by type and range.

    Raises ConfigError, in one line that names the field.
    """
    config = ConfigDict(extra="forbid", allow_inf_nan=False)
    made: Any = dataclass(frozen=True, config=config)(of)
    create = made.__init__

    @functools.wraps(create)
    def init(self: Any, *given: Any, **named: Any) -> None:
        try:
            create(self, *given, **named)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = f"{first['loc'][0]}={first['input']!r:.100}"
            raise ConfigError(described(where, [first["msg"]])) from None

    made.__init__ = init
    return cast(type[T], made)


def _stops(given: Any) -> Any:
    return (given,) if isinstance(given, str) else as_tuple(given or ())


@checked
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

    max_tokens: Annotated[Whole, Field(ge=1)] = 256
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    repetition_penalty: Repetition | None = None
    seed: Annotated[Whole, Field(ge=-SEED_LIMIT, lt=SEED_LIMIT)] | None = None
    stop: Annotated[tuple[Stop, ...], BeforeValidator(_stops)] = ()
    ignore_eos: StrictBool = False
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logprobs: Annotated[Whole, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    structured_outputs: InstanceOf[StructuredOutputs] | None = None

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


@checked
class ResolvedSampling(SamplingParams):
    """The complete settings of an answer, without defaults from the model. Greedy by default."""

    temperature: Temperature = 0.0
    top_p: TopP = 1.0
    top_k: TopK = 0
    min_p: MinP = 0.0
    repetition_penalty: Repetition = 1.0


@checked
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

    do_sample: StrictBool = False
    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: TopK = 50
    min_p: MinP = 0.0
    repetition_penalty: Repetition = 1.0

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
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        if not own.pop("do_sample"):
            own["temperature"] = 0.0
        given = {field.name: getattr(asked, field.name) for field in fields(asked)}
        told = {name: value for name, value in given.items() if value is not None}
        return ResolvedSampling(**{**own, **told})


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
    try:
        ModelSampling(**{name: value})
    except ConfigError as error:
        return str(error)
    return None
