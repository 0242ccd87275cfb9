"""The fields of requests, named as OpenAI's and vLLM's; unknown ones are ignored, as by vLLM."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from cacheblend_rag.api.answers import Asked, Form
from cacheblend_rag.api.collection import Retriever, is_task
from cacheblend_rag.api.errors import bad_field
from cacheblend_rag.engines.sampling import SamplingParams
from cacheblend_rag.engines.structured import StructuredOutputs

if TYPE_CHECKING:
    from cacheblend_rag.engines.base import Engine
    from cacheblend_rag.text.chat import ChatPrompt

MOST_ANSWERS = 64
"""So many answers a request may ask for: prompts times ``n``."""
ANSWER_TOKENS = 2048
"""Longest answer of a request without a bound; a small model may never end by itself."""
TASK_TOKENS = 256
"""Default ``max_tokens`` of a client's own task, such as a title, tags or a few questions."""
MOST_STOPS = 16
MOST_TOOLS = 128
"""Most tools of a request, as in OpenAI's API, and most tool calls of a message."""
MOST_MESSAGES = 8192
_HARMLESS: Mapping[str, Any] = {
    "modalities": ["text"],
    "best_of": 1,
    "min_tokens": 0,
    "length_penalty": 1.0,
    "skip_special_tokens": True,
    "add_generation_prompt": True,
}
"""Values that change nothing, of some fields that the server lacks."""
_UNSUPPORTED: Mapping[str, str] = {
    **dict.fromkeys(
        (
            *("logit_bias", "audio", "web_search_options", "suffix", "prompt_logprobs"),
            *("min_tokens", "bad_words", "allowed_token_ids", "use_beam_search", "length_penalty"),
            *("include_stop_str_in_output", "skip_special_tokens", "continue_final_message"),
            *("add_generation_prompt", "chat_template", "chat_template_kwargs"),
            *("return_token_ids", "return_tokens_as_token_ids"),
        ),
        "leave it out",
    ),
    **dict.fromkeys(
        ("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
        "use structured_outputs or response_format",
    ),
    "echo": "it is for /v1/completions",
    "functions": "use tools",
    "function_call": "use tool_choice",
    "modalities": "use ['text']",
    "best_of": "use n",
    "stop_token_ids": "use stop",
    "truncate_prompt_tokens": "shorten the prompt",
    "documents": "put them into the messages",
    "prompt_embeds": "use prompt",
    "kv_transfer_params": "store chunks by /v1/cacheblend/documents",
}
"""Fields that would change an answer, if the server had them, and what to do instead."""
_SAMPLED = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed"),
    *("presence_penalty", "frequency_penalty", "ignore_eos"),
)


class Fields(BaseModel):
    """Part of a body; its values are of the JSON type that the API says."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


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


class Body(Fields):
    """The body of a request for answers: the fields that all kinds share.

    Attributes:
        prompt_field: the field that holds the prompt.
    """

    prompt_field: ClassVar[str]
    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    """Only prompts of the same salt share the KV of what they begin with; as long as vLLM's."""
    retrieve: bool | None = None
    """False: no passages of the collection are put into the prompt."""

    def check(self) -> None:
        """Raise ApiError for a known field that the server lacks."""
        for name, value in (self.model_extra or {}).items():
            if name in _UNSUPPORTED and not _is_off(value, _HARMLESS.get(name)):
                raise bad_field(name, f"is not supported: {_UNSUPPORTED[name]}")

    @abstractmethod
    def asked(self, engine: Engine, retriever: Retriever | None) -> Asked:
        """Return the prompts and settings for the engine.

        It encodes the prompts, so call it in a thread. Raises ApiError for a field that is not
        supported, or not together with another one, and whatever the engine raises.
        """

    @abstractmethod
    def form(self, asked: Asked, model: str) -> Form:
        """Return the form of the answers; model: the name that clients call the model."""

    def sampling(self, most: int = ANSWER_TOKENS, **given: Any) -> SamplingParams:
        """Return the sampling parameters; a field that is None takes its default.

        most: tokens, if nothing is said. given: what the body calls otherwise. Raises ConfigError,
        naming the field.
        """
        told = {**self.model_dump(include=set(_SAMPLED)), **given}
        told["max_tokens"] = told.get("max_tokens") or most
        return SamplingParams(**{name: one for name, one in told.items() if one is not None})

    def asked_chat(
        self, engine: Engine, retriever: Retriever | None, chat: ChatPrompt, n: int, **given: Any
    ) -> Asked:
        """Return the prompt and settings of a chat, with passages where they help.

        Chats with tools, and clients' tasks, are left as they are. given: as for ``sampling``.
        """
        task = is_task(chat.messages)
        sampling = self.sampling(TASK_TOKENS if task else ANSWER_TOKENS, **given)
        if retriever is None or self.retrieve is False or chat.tools or task:
            return Asked([engine.prepare(chat)], sampling, n)
        return retriever.asked(chat.messages, sampling, n)


class ChoicesBody(Body):
    """The fields that chat completions and completions share."""

    n: int | None = Field(default=None, ge=1, le=MOST_ANSWERS)
    max_tokens: int | None = Field(default=None, ge=1)
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: dict[str, Any] | None = None

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def check(self) -> None:
        """Raise ApiError for a field that the server lacks, and for options of no stream."""
        super().check()
        if self.stream_options is not None and not self.stream:
            raise bad_field("stream_options", "is for streams only: set stream to true")

    def sampling(self, most: int = ANSWER_TOKENS, **given: Any) -> SamplingParams:
        """Return how the answer is sampled; raises ApiError or ConfigError, naming the field."""
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if len(stops) > MOST_STOPS:
            raise bad_field("stop", f"must hold at most {MOST_STOPS} strings")
        top_k = 0 if self.top_k == -1 else self.top_k  # vLLM's way to say that it is off
        given["max_tokens"] = given.get("max_tokens") or self.max_tokens
        given |= {"stop": stops, "top_k": top_k, "structured_outputs": self._form()}
        return super().sampling(most, **given)

    def _form(self) -> StructuredOutputs | dict[str, Any] | None:
        """Return the form that an answer must have, None for free text."""
        asked, given = self.response_format, self.structured_outputs
        if asked is None or asked.type == "text":
            return given
        if given is not None:
            raise bad_field("structured_outputs", "and response_format exclude each other")
        return StructuredOutputs.of_response_format(asked.model_dump(by_alias=True))


def _is_off(value: Any, harmless: Any) -> bool:
    """Whether a value changes nothing; False turns off whatever is not on by default."""
    if isinstance(value, bool):
        return value is harmless or not (value or harmless is True)
    return value == harmless or value in (None, [], {}, "")
