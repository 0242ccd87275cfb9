"""CacheBlendLLM: LlamaIndex's LLM interface on an engine that reuses retrieved chunks' KV."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, cast

from llama_index.core.base.llms.generic_utils import (
    messages_to_prompt as generic_messages_to_prompt,
)
from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
    MessageRole,
)
from llama_index.core.bridge.pydantic import Field, PrivateAttr, field_validator, model_validator
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.llm import LLM, default_completion_to_prompt

from cacheblend_rag import (
    Arguments,
    BlendConfig,
    Chunk,
    ConversationKV,
    Delta,
    Engine,
    Generation,
    PromptError,
    SamplingParams,
    TurnPrompt,
    names_of,
    read_hints,
)
from llama_index.llms.cacheblend.events import Reporter
from llama_index.llms.cacheblend.hints import hints_in
from llama_index.llms.cacheblend.messages import plain_messages
from llama_index.llms.cacheblend.settings import EngineSettings

REPORT = "cacheblend"
Prompt = str | list[dict[str, str]]
"""A text, or messages for the model's own chat template."""
SAMPLING = names_of(SamplingParams)
CALL = Arguments.holding(
    "argument of a call",
    SAMPLING | {"hints", "blend_config", "recompute_ratio"},
    {"blend_config": BlendConfig},
)


class CacheBlendLLM(EngineSettings, LLM):
    """Answers prompts from the KV of the chunks in them, computed once, when they were indexed.

    Chunks known to the engine are found in the prompt text, so any query engine profits. What was
    reused is told in ``response.additional_kwargs["cacheblend"]`` and by CacheBlendReportEvent.

    Every call takes ``max_tokens``, ``temperature``, ``top_p``, ``top_k``, ``min_p``,
    ``repetition_penalty``, ``seed``, ``stop`` and ``ignore_eos``; ``recompute_ratio`` or a whole
    ``blend_config``; and ``hints``, the chunks or document ids its prompt holds. Sampling settings
    that are not given are the model's own (its ``generation_config``).

    Example:
        ```python
        from llama_index.llms.cacheblend import CacheBlendLLM

        llm = CacheBlendLLM(model="Qwen/Qwen2.5-1.5B-Instruct", kv_path="kv")
        print(llm.complete("What is RAG?"))
        ```

    """

    max_tokens: int = Field(default=256, description="Most new tokens of an answer.", gt=0)
    temperature: float | None = Field(
        default=None,
        description="0 is greedy; None is the model's own, as in its generation_config.",
        ge=0,
    )
    stop: list[str] = Field(default_factory=list, description="Strings that end an answer.")
    context_window: int | None = Field(
        default=None,
        description="Tokens of prompt and answer; by default what the model takes.",
        gt=0,
    )
    additional_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Defaults of further keyword arguments of every call."
    )

    _conversation: ConversationKV | None = PrivateAttr(default=None)

    def in_conversation(self, kv: ConversationKV) -> Self:
        """Return an LLM whose chat calls are turns of one conversation.

        The KV of its earlier turns is reused in them, and that of the new turn is kept. It shares
        this one's engine, which is opened if it is not.

        Args:
            kv: the conversation's, such as ``CacheBlendChatMemory.kv``.
        """
        self.open()
        bound = self.model_copy()
        bound._conversation = kv
        return bound

    @field_validator("stop", mode="before")
    @classmethod
    def _read_stop(cls, given: Any) -> Any:
        return [given] if isinstance(given, str) else [] if given is None else given

    @model_validator(mode="after")
    def _check_defaults(self) -> Self:
        self._call("", {})
        return self

    @classmethod
    def class_name(cls) -> str:
        return "CacheBlendLLM"

    @property
    def metadata(self) -> LLMMetadata:
        engine = self.open()
        return LLMMetadata(
            context_window=self.context_window or engine.context_window,
            num_output=self.max_tokens,
            is_chat_model=self._is_chat(engine),
            model_name=engine.model_name,
        )

    def to_payload(self) -> dict[str, Any]:
        """Describe the model for observers, without loading it and without secrets."""
        payload = {
            "class_name": self.class_name(),
            "model_name": Path(self.model or "").name,
            "num_output": self.max_tokens,
            "temperature": self.temperature,
            "recompute_ratio": self.blend_config.recompute_ratio,
        }
        return {**payload, **self.metadata.model_dump()} if self.is_open else payload

    # Completion

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        engine = self.open()
        call = self._call(self._completion_prompt(engine, prompt, formatted), kwargs)
        return _completion(call, engine.generate(call.prompt, call.sampling, **call.blending))

    @llm_completion_callback()
    def stream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseGen:
        engine = self.open()
        call = self._call(self._completion_prompt(engine, prompt, formatted), kwargs)
        deltas = engine.stream(call.prompt, call.sampling, **call.blending)
        return (_completion_step(call, delta) for delta in deltas)

    @llm_completion_callback()
    async def acomplete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponse:
        engine = await self.aopen()
        call = self._call(self._completion_prompt(engine, prompt, formatted), kwargs)
        return _completion(
            call, await engine.agenerate(call.prompt, call.sampling, **call.blending)
        )

    @llm_completion_callback()
    async def astream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseAsyncGen:
        engine = await self.aopen()
        call = self._call(self._completion_prompt(engine, prompt, formatted), kwargs)

        async def steps() -> CompletionResponseAsyncGen:
            async with _closing(
                engine.astream(call.prompt, call.sampling, **call.blending)
            ) as deltas:
                async for delta in deltas:
                    yield _completion_step(call, delta)

        return steps()

    # Chat

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        engine = self.open()
        call = self._call(self._turn(engine, messages), kwargs)
        return _chat(call, engine.generate(call.prompt, call.sampling, **call.blending))

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        engine = self.open()
        call = self._call(self._turn(engine, messages), kwargs)
        deltas = engine.stream(call.prompt, call.sampling, **call.blending)
        return (_chat_step(call, delta) for delta in deltas)

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        engine = await self.aopen()
        call = self._call(self._turn(engine, messages), kwargs)
        return _chat(call, await engine.agenerate(call.prompt, call.sampling, **call.blending))

    @llm_chat_callback()
    async def astream_chat(
        self, messages: Sequence[ChatMessage], **kwargs: Any
    ) -> ChatResponseAsyncGen:
        engine = await self.aopen()
        call = self._call(self._turn(engine, messages), kwargs)

        async def steps() -> ChatResponseAsyncGen:
            async with _closing(
                engine.astream(call.prompt, call.sampling, **call.blending)
            ) as deltas:
                async for delta in deltas:
                    yield _chat_step(call, delta)

        return steps()

    # Inside

    def _is_chat(self, engine: Engine) -> bool:
        return engine.has_chat_template if self.is_chat_model is None else self.is_chat_model

    def _completion_prompt(self, engine: Engine, prompt: str, formatted: bool) -> Prompt:
        """Return the text as it is, wrapped by the user's function, or as one user message."""
        if not isinstance(prompt, str):
            raise PromptError(f"prompt is a {type(prompt).__name__}: give a text")
        if formatted:
            return prompt
        wrap = self.completion_to_prompt
        if wrap is not None and wrap is not default_completion_to_prompt:
            return wrap(prompt)
        if self._is_chat(engine):
            return self._chat_prompt(engine, [ChatMessage(role=MessageRole.USER, content=prompt)])
        return prompt

    def _chat_prompt(self, engine: Engine, messages: Sequence[ChatMessage]) -> Prompt:
        """Return messages for the model's own template, or as a text where it has none."""
        render = self.messages_to_prompt
        if render is not None and render is not generic_messages_to_prompt:
            return render(messages)
        if engine.has_chat_template:
            return plain_messages(messages)
        return generic_messages_to_prompt(messages)

    def _turn(self, engine: Engine, messages: Sequence[ChatMessage]) -> Prompt | TurnPrompt:
        """Return messages as the conversation's next turn, which ends with the last of them."""
        prompt = self._chat_prompt(engine, messages)
        question = (messages[-1].content or "").strip() if messages else ""
        if self._conversation is None or not question:
            return prompt
        return TurnPrompt(self._conversation, prompt, question)

    def _call(self, prompt: Prompt | TurnPrompt, kwargs: dict[str, Any]) -> _Call:
        """Lay a call's arguments over the defaults; raises ConfigError on one that is not known."""
        wanted = {**CALL.read(self.additional_kwargs), **CALL.told(kwargs)}
        sampling = {name: wanted.pop(name) for name in SAMPLING & wanted.keys()}
        defaults = {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "stop": tuple(self.stop),
        }
        hints = wanted.get("hints")
        return _Call(
            prompt=prompt,
            sampling=SamplingParams(**{**defaults, **sampling}),
            config=_config(self.blend_config, **wanted),
            hints=tuple(hints_in(_text(prompt))) if hints is None else read_hints(hints),
        )


@dataclass(frozen=True)
class _Call:
    """One request: what is asked of the engine, and the answer so far."""

    prompt: Prompt | TurnPrompt
    sampling: SamplingParams
    config: BlendConfig
    hints: tuple[Chunk | str, ...]
    pieces: list[str] = field(default_factory=list)
    reporter: Reporter = field(default_factory=Reporter)

    @property
    def blending(self) -> dict[str, Any]:
        return {"config": self.config, "hints": self.hints}

    def grow(self, delta: Delta) -> str:
        """Return the answer so far."""
        self.pieces.append(delta.text)
        return "".join(self.pieces)

    def told(self, generation: Generation) -> dict[str, Any]:
        """Publish the report; return what a response says beside its text."""
        report = generation.report.to_dict()
        self.reporter.publish(report)
        usage = {
            "prompt_tokens": generation.prompt_tokens,
            "completion_tokens": len(generation.token_ids),
            "total_tokens": generation.prompt_tokens + len(generation.token_ids),
            "cached_tokens": generation.report.reused_tokens,
        }
        return {
            "raw": {**usage, "usage": usage, "finish_reason": generation.finish_reason},
            "additional_kwargs": {REPORT: report},
        }


def _closing(
    deltas: AsyncIterator[Delta],
) -> AbstractAsyncContextManager[AsyncGenerator[Delta, None]]:
    """Stop the work as soon as the reader stops, not at the next garbage collection."""
    return aclosing(cast("AsyncGenerator[Delta, None]", deltas))


def _config(
    config: BlendConfig,
    *,
    blend_config: BlendConfig | dict[str, Any] | None = None,
    recompute_ratio: float | None = None,
    hints: object = None,
) -> BlendConfig:
    if blend_config is not None:
        config = BlendConfig.of(blend_config)
    return config if recompute_ratio is None else config.with_ratio(recompute_ratio)


def _text(prompt: Prompt | TurnPrompt) -> str:
    if isinstance(prompt, TurnPrompt):
        return _text(cast("Prompt", prompt.prompt))
    if isinstance(prompt, str):
        return prompt
    return "\n".join(message["content"] for message in prompt)


def _message(text: str) -> ChatMessage:
    return ChatMessage(role=MessageRole.ASSISTANT, content=text)


def _completion(call: _Call, generation: Generation) -> CompletionResponse:
    return CompletionResponse(text=generation.text, **call.told(generation))


def _completion_step(call: _Call, delta: Delta) -> CompletionResponse:
    told = call.told(delta.generation) if delta.generation else {}
    return CompletionResponse(text=call.grow(delta), delta=delta.text, **told)


def _chat(call: _Call, generation: Generation) -> ChatResponse:
    return ChatResponse(message=_message(generation.text), **call.told(generation))


def _chat_step(call: _Call, delta: Delta) -> ChatResponse:
    told = call.told(delta.generation) if delta.generation else {}
    return ChatResponse(message=_message(call.grow(delta)), delta=delta.text, **told)
