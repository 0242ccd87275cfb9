"""The fields of requests, named as OpenAI's and vLLM's; unknown ones are ignored, as by vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from cacheblend_rag.api.errors import ApiError, bad_field, of_engine
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.engines.structured import StructuredOutputs
from cacheblend_rag.errors import ConfigError

MOST_ANSWERS = 64
"""So many answers a request may ask for: prompts times ``n``."""
ANSWER_TOKENS = 2048
"""Longest answer of a request without a bound; a small model may never end by itself."""
MOST_STOPS = 16
MOST_TOOLS = 128
"""Most tools of a request, as in OpenAI's API, and most tool calls of a message."""
MOST_MESSAGES = 8192
_NO_GUIDED = "use structured_outputs or response_format"
_UNSUPPORTED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "logit_bias": ((), ""),
    "functions": ((), "use tools"),
    "function_call": ((), "use tool_choice"),
    "audio": ((), ""),
    "modalities": ((["text"],), "use ['text']"),
    "web_search_options": ((), ""),
    "suffix": ((), ""),
    "best_of": ((1,), "use n"),
    "prompt_logprobs": ((), ""),
    "min_tokens": ((0,), ""),
    "stop_token_ids": ((), "use stop"),
    "bad_words": ((), ""),
    "allowed_token_ids": ((), ""),
    "use_beam_search": ((), ""),
    "length_penalty": ((1, 1.0), ""),
    "include_stop_str_in_output": ((), ""),
    "skip_special_tokens": ((True,), ""),
    "truncate_prompt_tokens": ((), "shorten the prompt"),
    "continue_final_message": ((), ""),
    "add_generation_prompt": ((True,), ""),
    "chat_template": ((), ""),
    "chat_template_kwargs": ((), ""),
    "documents": ((), "put them into the messages"),
    "prompt_embeds": ((), "use prompt"),
    "return_token_ids": ((), ""),
    "return_tokens_as_token_ids": ((), ""),
    "kv_transfer_params": ((), "store chunks by /v1/cacheblend/documents"),
    "guided_json": ((), _NO_GUIDED),
    "guided_regex": ((), _NO_GUIDED),
    "guided_choice": ((), _NO_GUIDED),
    "guided_grammar": ((), _NO_GUIDED),
}
"""Fields that would change an answer, if the server had them: values that change nothing, and what
to give instead."""


class Fields(BaseModel):
    """Part of a body; its values are of the JSON type that the API says."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


CacheSalt = Annotated[str, Field(min_length=1, max_length=128)]
"""Only prompts of the same salt share the KV of what they begin with; as long as vLLM's."""


class StreamOptions(Fields):
    """What a stream tells beside the answer."""

    include_usage: bool | None = None


class JsonSchema(Fields):
    """A named JSON schema."""

    name: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")


class ResponseFormat(Fields):
    """The form of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Request(Fields):
    """The fields that chat completions and completions share."""

    model: str | None = None
    n: int | None = Field(default=None, ge=1, le=MOST_ANSWERS)
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = None
    cache_salt: CacheSalt | None = None

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def check(self) -> None:
        """Raise ApiError for a field that the server lacks, and for options of no stream."""
        refuse_unsupported(self)
        if self.stream_options is not None and not self.stream:
            raise bad_field("stream_options", "is for streams only: set stream to true")

    def sampling(self, *, logprobs: int | None, max_tokens: int | None = None) -> SamplingParams:
        """Return how the answer is sampled; raises ApiError for a value that is out of range."""
        return sampling_of(
            max_tokens=max_tokens or self.max_tokens,
            stop=self.stop,
            logprobs=logprobs,
            structured_outputs=form_of(self.response_format, self.structured_outputs),
            **{
                name: getattr(self, name)
                for name in (
                    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed"),
                    *("presence_penalty", "frequency_penalty", "ignore_eos"),
                )
            },
        )


def refuse_unsupported(body: BaseModel) -> None:
    """Raise ApiError for a known field that this server lacks."""
    for name, value in (body.model_extra or {}).items():
        if name not in _UNSUPPORTED:
            continue
        harmless, instead = _UNSUPPORTED[name]
        # False is no value that turns something on, but for a field that is on by default.
        off: tuple[Any, ...] = (None, [], {}, "") if True in harmless else (None, [], {}, "", False)
        if not any(type(value) is type(one) and value == one for one in (*off, *harmless)):
            raise bad_field(name, f"is not supported: {instead or 'leave it out'}")


def sampling_of(**given: Any) -> SamplingParams:
    """Return sampling settings; None is the default. Raises ApiError, naming the field."""
    stop = given.pop("stop", None)
    stops = [stop] if isinstance(stop, str) else stop or []
    if len(stops) > MOST_STOPS:
        raise bad_field("stop", f"must hold at most {MOST_STOPS} strings")
    if given.get("top_k") == -1:  # vLLM's way to say that it is off
        given["top_k"] = 0
    given["max_tokens"] = given.get("max_tokens") or ANSWER_TOKENS
    try:
        return SamplingParams(
            stop=tuple(stops), **{name: value for name, value in given.items() if value is not None}
        )
    except ConfigError as error:
        field = str(error).partition("=")[0]
        raise ApiError.of_field(field, str(error)) from error


def form_of(
    response_format: ResponseFormat | None, structured: Mapping[str, Any] | None
) -> StructuredOutputs | None:
    """Return the form that an answer must have, None for free text; raises ApiError."""
    if response_format is not None and response_format.type != "text":
        if structured is not None:
            raise bad_field("structured_outputs", "and response_format exclude each other")
        return _of_format(response_format)
    return None if structured is None else _structured(structured)


def _of_format(response_format: ResponseFormat) -> StructuredOutputs | None:
    try:
        return StructuredOutputs.of_response_format(response_format.model_dump(by_alias=True))
    except ConfigError as error:
        raise of_engine(error, None) from error


def _structured(structured: Mapping[str, Any]) -> StructuredOutputs:
    given = {name: value for name, value in structured.items() if value is not None}
    names = [field.name for field in fields(StructuredOutputs)]
    unknown = given.keys() - set(names)
    if unknown:
        raise bad_field(
            f"structured_outputs.{min(unknown):.40}",
            f"is unknown: give one of {', '.join(names)}",
        )
    try:
        return StructuredOutputs(**given)
    except (ConfigError, TypeError) as error:
        raise ApiError.of_field("structured_outputs", str(error)) from error
