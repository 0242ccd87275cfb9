"""ChatCacheBlend: a chat model that finds known passages in its prompt and reuses their KV."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass
from typing import Any, Self

from cacheblend_rag import (
    ChatPrompt,
    ConfigError,
    ConversationKV,
    Engine,
    Generation,
    SamplingParams,
    TurnPrompt,
    read_hints,
)
from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LangSmithParams, LanguageModelInput
from langchain_core.messages import AIMessage, BaseMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.outputs import Generation as CachedGeneration
from langchain_core.runnables import Runnable
from langchain_core.tools import BaseTool
from pydantic import ConfigDict, Field, field_validator, model_validator

from langchain_cacheblend.answers import AnswerReader, overflow_told
from langchain_cacheblend.call_options import (
    OWN_FIELDS,
    AskedTools,
    read_options,
    to_sampling,
    told_options,
)
from langchain_cacheblend.hints import current_hints
from langchain_cacheblend.history import current_conversation
from langchain_cacheblend.messages import plain_text, to_chat_messages, to_engine_messages
from langchain_cacheblend.options import EngineOptions
from langchain_cacheblend.structured_output import bind_form, to_response_format, with_parser
from langchain_cacheblend.tool_calling import to_engine_tools, to_tool_choice

Prompt = str | list[dict[str, str]] | ChatPrompt


class ChatCacheBlend(EngineOptions, BaseChatModel):
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
    plain reuse, 1 is ordinary prefill), ``hints`` (Chunks, or ids of documents, the prompt is known
    to hold) and ``conversation`` (a ConversationKV: the KV of its earlier turns is reused, and that
    of this call's turn kept).
    """

    model_config = ConfigDict(
        arbitrary_types_allowed=True, populate_by_name=True, hide_input_in_errors=True
    )

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
    streaming: bool = False
    """Stream inside ``invoke`` too, so that callbacks see tokens."""

    @field_validator("stop", mode="before")
    @classmethod
    def _read_stop(cls, given: Any) -> Any:
        return [given] if isinstance(given, str) else [] if given is None else given

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
            "default_stop": self.stop,
            "blend_config": self.blending.to_dict(),
        }

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(**{"stop": self.stop, **told_options(kwargs, stop)})
        params["ls_provider"] = "cacheblend"
        params["ls_model_name"] = str(kwargs.get("model", self.model_name))
        return params

    def _get_invocation_params(
        self, stop: list[str] | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        return super()._get_invocation_params(**told_options(kwargs, stop))

    def _get_llm_string(self, stop: list[str] | None = None, **kwargs: Any) -> str:
        return super()._get_llm_string(**told_options(kwargs, stop))

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
        engine = self.engine
        call = self._call(engine, messages, stop, kwargs)
        with overflow_told():
            return _result(call, engine.generate(call.prompt, call.sampling, **call.blending))

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        engine = await self._source.aopen(self._engine_config)
        call = self._call(engine, messages, stop, kwargs)
        with overflow_told():
            answer = await engine.agenerate(call.prompt, call.sampling, **call.blending)
            return _result(call, answer)

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        engine = self.engine
        call = self._call(engine, messages, stop, kwargs)
        with overflow_told():
            deltas = engine.stream(call.prompt, call.sampling, **call.blending)
            with closing(deltas):
                for delta in deltas:
                    chunk = ChatGenerationChunk(message=call.reader.piece(delta))
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
        engine = await self._source.aopen(self._engine_config)
        call = self._call(engine, messages, stop, kwargs)
        with overflow_told():
            deltas = engine.astream(call.prompt, call.sampling, **call.blending)
            async with aclosing(deltas):
                async for delta in deltas:
                    chunk = ChatGenerationChunk(message=call.reader.piece(delta))
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

        Args:
            tools: functions, tools, Pydantic classes, TypedDicts, or dicts as OpenAI's API takes.
            tool_choice: ``auto`` (the model decides; the default), ``none``, ``any`` or
                ``required`` (at least one), or the one tool to be called: its name or a dict. Where
                calls are forced, the engine holds the answer to the tools' schemas.
            strict: True closes the objects of these schemas; the engine keeps to them anyway.
            parallel_tool_calls: False takes the first of several calls.
            response_format: the form of an answer that calls no tool.
            kwargs: other call options.

        Raises:
            ConfigError: when a tool, the choice or the format is none.
        """
        bound = to_engine_tools(tools, strict)
        if tool_choice is not None and tool_choice is not False:
            kwargs["tool_choice"] = to_tool_choice(tool_choice, bound)
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
        model, parser = bind_form(self, schema, method, strict, kwargs)
        return with_parser(model, parser, include_raw)

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

    def _call(
        self,
        engine: Engine,
        messages: Sequence[BaseMessage],
        stop: list[str] | None,
        given: Mapping[str, Any],
    ) -> _Call:
        """Return what to ask the engine; raises ConfigError for an unknown option."""
        options = read_options(given, stop)
        config, ratio = self.blending, options.get("recompute_ratio")
        if ratio is not None:
            config = config.with_ratio(ratio)
        hints = options.get("hints")
        if hints is None:
            hints = current_hints()
        asked = AskedTools.of(options)
        prompt: Prompt
        if asked.tools:
            prompt = ChatPrompt(
                to_chat_messages(messages), asked.tools, asked.choice, asked.parallel
            )
        elif engine.has_chat_template:
            prompt = to_engine_messages(messages)
        else:
            prompt = plain_text(messages)
        return _Call(
            prompt=_as_turn(prompt, messages, options.get("conversation")),
            sampling=self._sampling(options),
            blending={"config": config, "hints": read_hints(hints)},
            reader=AnswerReader(self.model_name),
        )

    def _sampling(self, options: Mapping[str, Any]) -> SamplingParams:
        own = {name: getattr(self, name) for name in (*OWN_FIELDS, "stop")}
        return to_sampling({**own, **options})


def checked_llm(llm: ChatCacheBlend) -> ChatCacheBlend:
    """Return ``llm``; raises ConfigError when it is none of ours."""
    if not isinstance(llm, ChatCacheBlend):
        raise ConfigError(f"llm is a {type(llm).__name__}: give a ChatCacheBlend")
    return llm


@dataclass(frozen=True)
class _Call:
    """One request as the engine takes it."""

    prompt: Prompt | TurnPrompt
    sampling: SamplingParams
    blending: Mapping[str, Any]
    reader: AnswerReader


def _result(call: _Call, answer: Generation) -> ChatResult:
    return ChatResult(generations=[ChatGeneration(message=call.reader.message(answer))])


def _as_turn(prompt: Prompt, messages: Sequence[BaseMessage], given: Any) -> Prompt | TurnPrompt:
    """Return a prompt as the next turn of its conversation.

    The turn ends with the last message, or where tools are called, with the last one that is no
    tool's result: templates may print results otherwise than they are.

    given: the call option. Raises ConfigError when that is no ConversationKV.
    """
    conversation = current_conversation() if given is None else given
    if isinstance(prompt, ChatPrompt):
        messages = [one for one in messages if not isinstance(one, AIMessage | ToolMessage)]
    if conversation is None or not messages or not str(messages[-1].text).strip():
        return prompt
    if not isinstance(conversation, ConversationKV):
        raise ConfigError(
            f"conversation is a {type(conversation).__name__}: give a ConversationKV, such as "
            "history.kv"
        )
    return TurnPrompt(conversation, prompt, str(messages[-1].text))
