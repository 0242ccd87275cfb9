"""How an answer's tokens are sampled: what a request asks for, and a model's own settings."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

from pydantic import BeforeValidator, Field

from cacheblend_rag.engines.structured import StructuredOutputs
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.settings.base import Positive, Settings, as_tuple

logger = logging.getLogger(__name__)

MOST_LOGPROBS = 20
"""As many alternatives as vLLM and the OpenAI API tell of by default."""
LONGEST_STOP = 4096
"""Characters of a stop string."""
SEED_LIMIT = 1 << 63
"""Seeds are 64-bit signed integers, in PyTorch as in vLLM's API."""
OF_MODELS = ("do_sample", "temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Fields of a model's GenerationConfig that are followed."""

Number = Annotated[float, Field(allow_inf_nan=False)]
Temperature = Annotated[Number, Field(ge=0)]
TopP = Annotated[Number, Field(gt=0, le=1)]
TopK = Annotated[int, Field(ge=0)]
MinP = Annotated[Number, Field(ge=0, le=1)]
Repetition = Annotated[Number, Field(gt=0)]
Penalty = Annotated[Number, Field(ge=-2, le=2)]
Stop = Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]


def _stops(given: Any) -> Any:
    return (given,) if isinstance(given, str) else as_tuple(given or ())


class SamplingParams(Settings):
    """How tokens are sampled.

    ``temperature``, ``top_p``, ``top_k``, ``min_p`` and ``repetition_penalty`` take the value of
    the model's ``generation_config`` if they are None, as in Hugging Face's ``generate``: a
    model is greedy unless its ``generation_config`` has ``do_sample=true`` or a temperature above 0
    is given here.
    """

    _noun: ClassVar[str] = "setting of sampling"

    max_tokens: Positive = 256
    """At most so many new tokens; the model's ``max_new_tokens`` is not read."""
    temperature: Temperature | None = None
    """0 is greedy."""
    top_p: TopP | None = None
    """Above 0 and at most 1, which is off."""
    top_k: TopK | None = None
    """0 is off."""
    min_p: MinP | None = None
    """From 0, which is off, to 1."""
    repetition_penalty: Repetition | None = None
    """1 is off; tokens of the prompt count as repeated, too."""
    seed: Annotated[int, Field(ge=-SEED_LIMIT, lt=SEED_LIMIT)] | None = None
    """None is a random one."""
    stop: Annotated[tuple[Stop, ...], BeforeValidator(_stops)] = ()
    """Strings that end the answer and are cut from it, of at most 4,096 characters each."""
    ignore_eos: bool = False
    """Go on past the end-of-sequence token (benchmarks)."""
    presence_penalty: Penalty = 0.0
    """From -2 to 2; taken off the logit of each token that the answer already has. 0 is off. Tokens
    of the prompt do not count, here and in the next one."""
    frequency_penalty: Penalty = 0.0
    """From -2 to 2; the same, times how often the answer has the token."""
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    """Also tell the log-probability of each token of the answer, and of this many of the most
    likely tokens in its place (0 to 20); None tells none."""
    prompt_logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    """The same for each token of the prompt, by the embedded engine: it computes the whole prompt
    then, and reuses nothing. None tells none."""
    structured_outputs: (
        Annotated[StructuredOutputs, BeforeValidator(StructuredOutputs.of)] | None
    ) = None
    """The form that the answer must have, or a mapping of its fields; None is free text."""

    @classmethod
    def of_call(cls, given: Mapping[str, Any]) -> Self:
        """Return the settings among the arguments of a call, which may be OpenAI's.

        Args:
            given: fields, and others, which are ignored; None is not given. ``response_format``
                stands for ``structured_outputs``, and ``logprobs`` may be a boolean beside
                ``top_logprobs``.

        Raises:
            ConfigError: when a field is out of range, or two say the same.
        """
        told = {n: v for n, v in given.items() if n in cls.model_fields and v is not None}
        if (form := given.get("response_format")) is not None:
            if "structured_outputs" in told:
                raise ConfigError("structured_outputs and response_format: give one of them")
            told["structured_outputs"] = StructuredOutputs.of_response_format(form)
        top, wanted = given.get("top_logprobs"), given.get("logprobs")
        if wanted is None or isinstance(wanted, bool):
            told["logprobs"] = top if wanted is None else (top or 0) if wanted else None
        return cls(**told)

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
        return cls(max_tokens=max_tokens, temperature=0.0, repetition_penalty=1.0, **more)


class ResolvedSampling(SamplingParams):
    """The complete settings of an answer, without defaults from the model. Greedy by default."""

    temperature: Temperature = 0.0
    top_p: TopP = 1.0
    top_k: TopK = 0
    min_p: MinP = 0.0
    repetition_penalty: Repetition = 1.0

    @classmethod
    def of_model(cls, values: Mapping[str, Any]) -> Self:
        """Return how a model's answers are sampled where a request asks for nothing else.

        Args:
            values: fields of its GenerationConfig. One that is left out, or wrong, is what Hugging
                Face's ``generate`` takes then.
        """
        found = {name: values.get(name) for name in OF_MODELS}
        own = {n: v for n, v in found.items() if v is not None and _problem(n, v) is None}
        own = {"temperature": 1.0, "top_k": 50, **own}
        return cls(**own if own.pop("do_sample", False) else {**own, "temperature": 0.0})

    def resolve(self, asked: SamplingParams) -> Self:
        """Return the settings of an answer: those asked for, these for the rest."""
        return self.with_given(**dict(asked))


UNSUPPORTED = {
    1: ("num_beams", "typical_p", "encoder_repetition_penalty", "guidance_scale"),
    0: (
        "penalty_alpha", "epsilon_cutoff", "eta_cutoff", "top_h", "no_repeat_ngram_size",
        "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "min_length",
        "min_new_tokens", "bad_words_ids", "sequence_bias", "suppress_tokens",
        "begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id", "stop_strings",
        "presence_penalty", "frequency_penalty", "watermarking_config",
    ),
}  # fmt: skip
"""Generation settings that no engine here supports: name and the value that disables each (an empty
value does, too). They are transformers' own, and two that vLLM reads."""


def ignored_settings(values: Mapping[str, Any]) -> list[str]:
    """Return the fields of a GenerationConfig that are ignored, with reasons, one text each."""
    given = {name: value for name, value in values.items() if value is not None}
    wrong = (_problem(name, given[name]) for name in OF_MODELS if name in given)
    unsupported = (
        f"{name}={given[name]!r:.60} is not supported"
        for off, names in UNSUPPORTED.items()
        for name in names
        if given.get(name, off) != off and given[name] not in ([], {}, "")
    )
    return [*filter(None, wrong), *unsupported]


def warn_of_ignored(values: Mapping[str, Any]) -> None:
    """Log one line if fields of a GenerationConfig are ignored."""
    if ignored := ignored_settings(values):
        logger.warning("ignored in the model's generation_config: %s", "; ".join(ignored))


def _problem(name: str, value: Any) -> str | None:
    """Return why a field of a GenerationConfig cannot be followed, or None when it can."""
    if name == "do_sample":
        return None if isinstance(value, bool) else f"{name}={value!r:.100} must be true or false"
    try:
        ResolvedSampling(**{name: value})
    except ConfigError as error:
        return str(error)
    return None
