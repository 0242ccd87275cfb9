"""ChatCacheBlend: a chat model that finds known passages in its prompt and reuses their KV."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass
from typing import Any, Self

from cacheblend_rag import (
    Arguments,
    BlendConfig,
    Chunk,
    ConfigError,
    ConversationKV,
    Delta,
    Engine,
    Generation,
    SamplingParams,
    TurnPrompt,
    read_hints,
)
from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LangSmithParams
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.outputs import Generation as CachedGeneration
from pydantic import ConfigDict, Field, field_validator, model_validator

from langchain_cacheblend.hints import current_hints
from langchain_cacheblend.history import current_conversation
from langchain_cacheblend.messages import plain_text, to_engine_messages
from langchain_cacheblend.options import EngineOptions

SAMPLING_FIELDS = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "seed",
)
CALL = Arguments(
    "call option",
    frozenset({*SAMPLING_FIELDS, "stop", "recompute_ratio", "hints", "conversation"}),
)
NO_TOOLS = (
    "ChatCacheBlend calls no tools: give the agent a model that does, and let "
    "langchain_cacheblend.middleware.CacheBlendMiddleware(llm) answer from what its tools retrieve"
)
NO_STRUCTURE = (
    "ChatCacheBlend has no structured output: ask for the format in the prompt and parse the "
    "answer, with llm | PydanticOutputParser(...) for instance"
)
CORE_FIELDS = frozenset({"stream"})
"""Call options that langchain-core reads itself."""


class ChatCacheBlend(EngineOptions, BaseChatModel):
    """A self-hosted chat model that reuses the KV of retrieved passages.

    .. code-block:: python

        llm = ChatCacheBlend(model="path/to/model", instruction=prompt, kv_path="kv")
        answer = llm.invoke("...")
        answer.response_metadata["cacheblend"]  # what was reused, and why the rest was not

    Passages precomputed by CacheBlendTransformer are found in any prompt, word for word. A passage
    that is not found or not stored is computed, as by any other model.

    Each call takes ``max_tokens``, ``temperature``, ``top_p``, ``top_k``, ``min_p``,
    ``repetition_penalty``, ``seed`` and ``stop`` in place of this object's own, ``recompute_ratio``
    (0 is plain reuse, 1 is ordinary prefill), ``hints`` (Chunks, or ids of documents, the prompt
    is known to hold) and ``conversation`` (a ConversationKV: the KV of its earlier turns is reused,
    and that of this call's turn kept).
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
    seed: int | None = None
    """None draws one."""
    stop: list[str] = Field(default_factory=list)
    """Strings, or one, that end an answer and are cut from it."""
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
            **{name: getattr(self, name) for name in SAMPLING_FIELDS},
            "model_sampling": repr(self.engine.model_sampling) if self._source.was_given else None,
            "default_stop": self.stop,
            "blend_config": self._blend_config().to_dict(),
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
        engine = self.engine
        call = self._call(engine, messages, stop, kwargs)
        return self._result(
            engine.generate(call.prompt, call.sampling, config=call.config, hints=call.hints),
        )

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        engine = await self._source.aopen(self._engine_config)
        call = self._call(engine, messages, stop, kwargs)
        return self._result(
            await engine.agenerate(
                call.prompt, call.sampling, config=call.config, hints=call.hints
            ),
        )

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        engine = self.engine
        call = self._call(engine, messages, stop, kwargs)
        deltas = engine.stream(call.prompt, call.sampling, config=call.config, hints=call.hints)
        with closing(deltas):  # type: ignore[type-var]
            for delta in deltas:
                chunk = self._chunk(delta)
                if run_manager:
                    run_manager.on_llm_new_token(delta.text, chunk=chunk)
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
        deltas = engine.astream(call.prompt, call.sampling, config=call.config, hints=call.hints)
        async with aclosing(deltas):  # type: ignore[type-var]
            async for delta in deltas:
                chunk = self._chunk(delta)
                if run_manager:
                    await run_manager.on_llm_new_token(delta.text, chunk=chunk)
                yield chunk

    # What it cannot do

    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        """Refuse: the model calls no tools.

        Raises:
            NotImplementedError: always; it says what to do instead.
        """
        raise NotImplementedError(NO_TOOLS)

    def with_structured_output(self, schema: Any, **kwargs: Any) -> Any:
        """Refuse: answers are plain text.

        Raises:
            NotImplementedError: always; it says what to do instead.
        """
        raise NotImplementedError(NO_STRUCTURE)

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

    def _blend_config(self) -> BlendConfig:
        """Return the config of calls that change nothing; opens nothing."""
        if self.blend_config is not None:
            return self.blend_config
        return self.engine.config if self.is_open else BlendConfig()

    def _call(
        self,
        engine: Engine,
        messages: Sequence[BaseMessage],
        stop: list[str] | None,
        options: Mapping[str, Any],
    ) -> _Call:
        """Return what to ask the engine; raises ConfigError for an unknown option."""
        given = {name: value for name, value in options.items() if name not in CORE_FIELDS}
        options = CALL.told(_with_stop(given, stop))
        config, ratio = self._blend_config(), options.get("recompute_ratio")
        if ratio is not None:
            config = config.with_ratio(ratio)
        hints = options.get("hints")
        if hints is None:
            hints = current_hints()
        prompt = to_engine_messages(messages) if engine.has_chat_template else plain_text(messages)
        return _Call(
            prompt=_as_turn(prompt, messages, options.get("conversation")),
            sampling=self._sampling(options),
            config=config,
            hints=read_hints(hints),
        )

    def _sampling(self, options: Mapping[str, Any]) -> SamplingParams:
        names = (*SAMPLING_FIELDS, "stop")
        return SamplingParams(**{name: options.get(name, getattr(self, name)) for name in names})

    def _result(self, generation: Generation) -> ChatResult:
        message = AIMessage(
            content=generation.text,
            usage_metadata=_usage(generation),
            response_metadata=self._metadata(generation),
        )
        return ChatResult(generations=[ChatGeneration(message=message)])

    def _chunk(self, delta: Delta) -> ChatGenerationChunk:
        """Return one piece of an answer; the last one carries usage and report."""
        if delta.generation is None:
            return ChatGenerationChunk(message=AIMessageChunk(content=delta.text))
        return ChatGenerationChunk(
            message=AIMessageChunk(
                content=delta.text,
                usage_metadata=_usage(delta.generation),
                response_metadata=self._metadata(delta.generation),
                chunk_position="last",
            )
        )

    def _metadata(self, generation: Generation) -> dict[str, Any]:
        return {
            "model_name": self.model_name,
            "model_provider": "cacheblend",
            "finish_reason": generation.finish_reason,
            "cacheblend": generation.report.to_dict(),
        }


def checked_llm(llm: ChatCacheBlend) -> ChatCacheBlend:
    """Return ``llm``; raises ConfigError when it is none of ours."""
    if not isinstance(llm, ChatCacheBlend):
        raise ConfigError(f"llm is a {type(llm).__name__}: give a ChatCacheBlend")
    return llm


@dataclass(frozen=True)
class _Call:
    """One request as the engine takes it."""

    prompt: str | list[dict[str, str]] | TurnPrompt
    sampling: SamplingParams
    config: BlendConfig
    hints: Sequence[Chunk | str]


def _as_turn(
    prompt: str | list[dict[str, str]], messages: Sequence[BaseMessage], given: Any
) -> str | list[dict[str, str]] | TurnPrompt:
    """Return a prompt as the next turn of its conversation, which ends with the last message.

    given: the call option. Raises ConfigError when that is no ConversationKV.
    """
    conversation = current_conversation() if given is None else given
    if conversation is None or not messages or not str(messages[-1].text).strip():
        return prompt
    if not isinstance(conversation, ConversationKV):
        raise ConfigError(
            f"conversation is a {type(conversation).__name__}: give a ConversationKV, such as "
            "history.kv"
        )
    return TurnPrompt(conversation, prompt, str(messages[-1].text))


def _usage(generation: Generation) -> UsageMetadata:
    prompt_tokens, new_tokens = generation.prompt_tokens, len(generation.token_ids)
    return UsageMetadata(
        input_tokens=prompt_tokens,
        output_tokens=new_tokens,
        total_tokens=prompt_tokens + new_tokens,
        input_token_details=InputTokenDetails(cache_read=generation.report.reused_tokens),
    )


def _with_stop(options: Mapping[str, Any], stop: str | list[str] | None) -> dict[str, Any]:
    return {**options} if stop is None else {**options, "stop": stop}


def _told(options: Mapping[str, Any], stop: str | list[str] | None) -> dict[str, Any]:
    """Return options by their own names, hinted chunks by hashes: traces and keys need no text."""
    told = CALL.renamed(_with_stop(options, stop))
    told.pop("conversation", None)  # holds a secret, and changes no answer on purpose
    if told.get("hints"):
        told["hints"] = [_hint_name(hint) for hint in read_hints(told["hints"])]
    return told


def _hint_name(hint: Chunk | str) -> str:
    if isinstance(hint, str):
        return hint
    digest = hashlib.sha256(repr(hint).encode(errors="surrogatepass")).hexdigest()[:16]
    return f"{hint.document_id}#{digest}"
