"""ChatCacheBlend: a chat model that finds known passages in its prompt and reuses their KV."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, closing
from operator import itemgetter
from typing import Any, Self, cast

from cacheblend_rag import (
    Arguments,
    ChatPrompt,
    ConfigError,
    Delta,
    Engine,
    Generation,
    SamplingParams,
    TurnPrompt,
    read_hints,
    read_tool_choice,
)
from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LangSmithParams, LanguageModelInput
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.output_parsers import JsonOutputParser, PydanticOutputParser
from langchain_core.output_parsers.openai_tools import (
    JsonOutputKeyToolsParser,
    PydanticToolsParser,
)
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.outputs import Generation as CachedGeneration
from langchain_core.runnables import Runnable, RunnableMap, RunnablePassthrough
from langchain_core.tools import BaseTool
from langchain_core.utils.pydantic import is_basemodel_subclass
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from langchain_cacheblend.documents import current_hints
from langchain_cacheblend.history import current_conversation
from langchain_cacheblend.messages import (
    overflow_told,
    plain_text,
    to_engine_tools,
    to_message,
    to_openai_messages,
    to_piece,
    to_response_format,
)
from langchain_cacheblend.options import EngineOptions

TOOLS = {"tools", "tool_choice", "parallel_tool_calls"}
FORMS = {"response_format", "structured_outputs"}
METHODS = ("json_schema", "function_calling", "json_mode")


class Sampling(BaseModel):
    """How answers are sampled: fields of the model, and options of a call."""

    max_tokens: int = 256
    """At most so many new tokens."""
    temperature: float | None = None
    """0 is greedy. None is the model's own (its generation_config), as for the next four."""
    top_p: float | None = None
    """Above 0 and at most 1, which is off."""
    top_k: int | None = None
    """0 is off."""
    min_p: float | None = None
    """From 0, which is off, to 1."""
    repetition_penalty: float | None = None
    """1 is off."""
    presence_penalty: float = 0.0
    """From -2 to 2: what a token loses that the answer has already."""
    frequency_penalty: float = 0.0
    """From -2 to 2: what a token loses for each time that the answer has it."""
    seed: int | None = None
    """None draws one."""
    stop: list[str] = Field(default_factory=list)
    """Strings, or one, that end an answer and are cut from it."""
    logprobs: bool | None = None
    """Tell in ``response_metadata`` how likely each token of the answer was, as ChatOpenAI does."""
    top_logprobs: int | None = None
    """And this many of the most likely tokens in its place, at most 20."""

    @field_validator("stop", mode="before")
    @classmethod
    def _read_stop(cls, given: Any) -> Any:
        return [given] if isinstance(given, str) else [] if given is None else given


OWN_FIELDS = tuple(Sampling.model_fields)
BLENDING = {"recompute_ratio", "hints"}
CALL = Arguments("call option", frozenset({*OWN_FIELDS, *TOOLS, *FORMS, *BLENDING}))


class ChatCacheBlend(EngineOptions, Sampling, BaseChatModel):
    """A self-hosted chat model that reuses the KV of retrieved passages.

    .. code-block:: python

        llm = ChatCacheBlend(model="path/to/model", instruction=prompt, kv_path="kv")
        answer = llm.invoke("...")
        answer.response_metadata["cacheblend"]  # what was reused, and why the rest was not

    Passages precomputed by CacheBlendTransformer are found in any prompt, word for word. A passage
    that is not found or not stored is computed, as by any other model.

    Each call takes the sampling fields below in place of this object's own, ``tools``,
    ``tool_choice`` and ``parallel_tool_calls`` (see bind_tools), ``response_format`` (OpenAI's, or
    a schema: the form of the answer) or ``structured_outputs`` (vLLM's), ``recompute_ratio`` (0 is
    plain reuse, 1 is ordinary prefill) and ``hints`` (Chunks, or ids of documents, the prompt is
    known to hold).
    """

    model_config = ConfigDict(
        arbitrary_types_allowed=True, populate_by_name=True, hide_input_in_errors=True
    )

    streaming: bool = False
    """Stream inside ``invoke`` too, so that callbacks see tokens."""

    @model_validator(mode="after")
    def _check_sampling(self) -> Self:
        self._sampling({})
        return self

    # What identifies the model

    @property
    def _llm_type(self) -> str:
        return "cacheblend"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """What an answer depends on; the LLM cache's key is made of it."""
        return {
            "model": self.model_name,
            "engine_identity": self.engine_identity,
            **{name: getattr(self, name) for name in OWN_FIELDS},
            "model_sampling": repr(self.engine.model_sampling) if self._source.was_given else None,
            "default_stop": self.stop,  # LangChain lays the call's own over "stop"
            "blend_config": self.blending.to_dict(),
        }

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(**{"stop": self.stop, **_told(kwargs, stop)})
        params["ls_provider"] = "cacheblend"
        params["ls_model_name"] = str(kwargs.get("model", self.model_name))
        return params

    def _get_invocation_params(
        self, stop: list[str] | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        return super()._get_invocation_params(**_told(kwargs, stop))

    def _get_llm_string(self, stop: list[str] | None = None, **kwargs: Any) -> str:
        return super()._get_llm_string(**_told(kwargs, stop))

    # Tokens

    def get_token_ids(self, text: str) -> list[int]:
        """Return the model's own tokens of ``text`` as a passage, which has no special tokens."""
        if self.custom_get_token_ids is not None:
            return self.custom_get_token_ids(text)
        return list(self.engine.tokenize(text))

    # Answers

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        with overflow_told():
            return self._result(
                self.engine.generate(**self._asked(self.engine, messages, stop, kwargs))
            )

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        engine = await self.aopen()
        with overflow_told():
            return self._result(
                await engine.agenerate(**self._asked(engine, messages, stop, kwargs))
            )

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        asked = self._asked(self.engine, messages, stop, kwargs)
        with overflow_told(), closing(self.engine.stream(**asked)) as deltas:
            for delta in deltas:
                chunk = self._chunk(delta)
                if run_manager:
                    run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        engine = await self.aopen()
        asked = self._asked(engine, messages, stop, kwargs)
        with overflow_told():
            async with aclosing(engine.astream(**asked)) as deltas:
                async for delta in deltas:
                    chunk = self._chunk(delta)
                    if run_manager:
                        await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                    yield chunk

    # Tools, and the form of answers

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: dict[str, Any] | str | bool | None = None,
        strict: bool | None = None,
        parallel_tool_calls: bool | None = None,
        response_format: Any = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Return this model with tools that its answers may call.

        Where calls are forced (``any``, ``required``, a name), the engine holds the answer to the
        tools' schemas.

        Args:
            tools: functions, tools, Pydantic classes, TypedDicts, or dicts as OpenAI's API takes.
            tool_choice: ``auto`` (the model decides; the default), ``none``, ``any`` or
                ``required`` (at least one), or the one tool to be called: its name or a dict.
            strict: True closes the objects of these schemas; the engine keeps to them anyway.
            parallel_tool_calls: False takes the first of several calls.
            response_format: the form of an answer that calls no tool.
            kwargs: other call options.

        Raises:
            CacheBlendError: when a tool, the choice or the format is none.
        """
        bound = to_engine_tools(tools, strict)
        if tool_choice is not None and tool_choice is not False:
            kwargs["tool_choice"] = read_tool_choice(tool_choice, bound)
        if parallel_tool_calls is not None:
            kwargs["parallel_tool_calls"] = parallel_tool_calls
        if response_format is not None:
            kwargs["response_format"] = to_response_format(response_format, strict)
        return self.bind(tools=bound, **kwargs)

    def with_structured_output(
        self,
        schema: dict[str, Any] | type | None = None,
        *,
        method: str = "json_schema",
        include_raw: bool = False,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, Any]:
        """Return this model with answers in the form of a schema, parsed.

        Args:
            schema: a Pydantic class (answers are its instances), a TypedDict or a JSON schema
                (dicts).
            method: ``json_schema`` (the engine holds the answer to the schema),
                ``function_calling`` (to a call of a tool with these parameters) or ``json_mode``
                (to any JSON object: say in the prompt which).
            include_raw: return ``raw`` (the message), ``parsed`` and ``parsing_error``.
            strict: True closes the schema's objects.
            kwargs: other call options.

        Raises:
            ConfigError: when the schema or the method is none.
        """
        if method not in METHODS:
            raise ConfigError(f"method={method!r:.40} must be one of {', '.join(METHODS)}")
        if schema is None and method != "json_mode":
            raise ConfigError(f"schema must be given with method={method!r}")
        told = {"method": method} | ({} if method == "json_mode" else {"strict": strict})
        bound = {**kwargs, "ls_structured_output_format": {"kwargs": told, "schema": schema}}
        is_class = isinstance(schema, type) and is_basemodel_subclass(schema)
        parser: Runnable[Any, Any]
        if method == "function_calling":
            name = to_engine_tools([schema])[0]["function"]["name"]
            model = self.bind_tools(
                [cast("Any", schema)],
                tool_choice=name,
                strict=strict,
                parallel_tool_calls=False,
                **bound,
            )
            parser = JsonOutputKeyToolsParser(key_name=name, first_tool_only=True)
            if is_class:
                parser = PydanticToolsParser(tools=[cast("Any", schema)], first_tool_only=True)
        else:
            is_free = method == "json_mode"
            form = {"type": "json_object"} if is_free else to_response_format(schema, strict)
            model = self.bind(response_format=form, **bound)
            parser = JsonOutputParser()
            if is_class:
                parser = PydanticOutputParser(pydantic_object=cast("Any", schema))
        if not include_raw:
            return model | parser
        parsed = RunnablePassthrough.assign(
            parsed=itemgetter("raw") | parser, parsing_error=lambda _: None
        )
        failed = RunnablePassthrough.assign(parsed=lambda _: None)
        told_why = parsed.with_fallbacks([failed], exception_key="parsing_error")
        return RunnableMap(raw=model) | told_why

    # Inside

    def _convert_cached_generations(
        self, cache_val: list[CachedGeneration]
    ) -> list[ChatGeneration]:
        """Return what the LLM cache holds, its reports replaced: they tell of other calls."""
        found = super()._convert_cached_generations([hit.model_copy() for hit in cache_val])
        for hit in found:
            told = {**hit.message.response_metadata, "cacheblend": {"cached": True}}
            hit.message = hit.message.model_copy(update={"response_metadata": told})
        return found

    def _asked(
        self,
        engine: Engine,
        messages: Sequence[BaseMessage],
        stop: list[str] | None,
        given: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Return what to ask the engine; raises ConfigError for an unknown option."""
        own = {name: value for name, value in given.items() if name != "stream"}  # LangChain's
        options = CALL.told(_with_stop(own, stop))
        ratio, hints = options.get("recompute_ratio"), options.get("hints")
        return {
            "prompt": _prompt(engine, messages, options),
            "sampling": self._sampling(options),
            "config": self.blending if ratio is None else self.blending.with_ratio(ratio),
            "hints": read_hints(current_hints() if hints is None else hints),
        }

    def _sampling(self, options: Mapping[str, Any]) -> SamplingParams:
        told = {name: getattr(self, name) for name in OWN_FIELDS} | dict(options)
        if "response_format" in told:
            told["response_format"] = to_response_format(told["response_format"])
        return SamplingParams.of_call(told)

    def _result(self, answer: Generation) -> ChatResult:
        message = to_message(answer, self.model_name)
        return ChatResult(generations=[ChatGeneration(message=message)])

    def _chunk(self, delta: Delta) -> ChatGenerationChunk:
        return ChatGenerationChunk(message=to_piece(delta, self.model_name))


def _prompt(
    engine: Engine, messages: Sequence[BaseMessage], options: Mapping[str, Any]
) -> str | ChatPrompt | TurnPrompt:
    """Return the prompt, as the next turn of its conversation if it has one.

    The turn ends with the last message that is no answer and no result of a tool.
    """
    told = to_openai_messages(messages)
    tools = to_engine_tools(options.get("tools") or [])
    choice = read_tool_choice(options.get("tool_choice"), tools)
    prompt: str | ChatPrompt = plain_text(told)
    if tools or engine.has_chat_template:
        prompt = ChatPrompt(told, tools, choice, options.get("parallel_tool_calls") is not False)
    conversation = current_conversation()
    asked = [one["content"] for one in told if one["role"] not in ("assistant", "tool")]
    if conversation is None or not asked or not asked[-1].strip():
        return prompt
    return TurnPrompt(conversation, prompt, asked[-1])


def _told(options: Mapping[str, Any], stop: str | list[str] | None) -> dict[str, Any]:
    """Return options by their own names, without texts of hints: for traces and keys of caches."""
    told = CALL.renamed(_with_stop(options, stop))
    if told.get("hints"):
        told["hints"] = [_digest(hint) for hint in read_hints(told["hints"])]
    return told


def _with_stop(options: Mapping[str, Any], stop: str | list[str] | None) -> dict[str, Any]:
    return {**options} if stop is None else {**options, "stop": stop}


def _digest(hint: object) -> str:
    return hashlib.sha256(repr(hint).encode(errors="surrogatepass")).hexdigest()[:16]
