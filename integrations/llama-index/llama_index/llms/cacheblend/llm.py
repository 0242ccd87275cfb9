"""CacheBlendLLM: LlamaIndex's LLM interface on an engine that reuses retrieved chunks' KV."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

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
from llama_index.core.llms.llm import ToolSelection, default_completion_to_prompt
from typing_extensions import override

from cacheblend_rag import (
    ChatPrompt,
    ConfigError,
    ConversationKV,
    Delta,
    Engine,
    PromptError,
    TurnPrompt,
)
from llama_index.llms.cacheblend.call import CALL, Call, Prompt, Wanted
from llama_index.llms.cacheblend.messages import plain_messages
from llama_index.llms.cacheblend.settings import EngineSettings
from llama_index.llms.cacheblend.structured import StructuredPredictor
from llama_index.llms.cacheblend.tools import ToolUse, selections

if TYPE_CHECKING:
    from llama_index.core.tools.types import BaseTool


class CacheBlendLLM(EngineSettings, StructuredPredictor):
    """Answers prompts from the KV of the chunks in them, computed once, when they were indexed.

    Chunks known to the engine are found in the prompt text, so any query engine profits. What was
    reused is told in ``response.additional_kwargs["cacheblend"]`` and by CacheBlendReportEvent.

    Every call takes the fields of SamplingParams (``max_tokens``, ``temperature``, ``stop``,
    ``logprobs``, ``structured_outputs`` and so on), or OpenAI's ``response_format`` and
    ``top_logprobs``; ``recompute_ratio`` or a whole ``blend_config``; and ``hints``, the chunks or
    document ids its prompt holds. Sampling settings that are not given are the model's own (its
    ``generation_config``).

    Models with a chat template call functions: ``chat`` takes ``tools``, ``tool_choice``,
    ``tool_required`` and ``parallel_tool_calls``. Structured predictions are constrained by the
    class' schema.

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
        self._wanted({})
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
            is_function_calling_model=self._is_chat(engine) and self._refuses_tools(engine) is None,
            model_name=engine.model_name,
        )

    def to_payload(self) -> dict[str, Any]:
        """Describe the model for observers, without loading it and without secrets."""
        payload = {
            "class_name": self.class_name(),
            "model_name": Path(self.model or "").name,
            "num_output": self.max_tokens,
            "temperature": self.temperature,
            "recompute_ratio": self.blending.recompute_ratio,
        }
        return {**payload, **self.metadata.model_dump()} if self.is_open else payload

    # Completion

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        engine = self.open()
        call = self._completion_call(engine, prompt, formatted, kwargs)
        return call.completion(engine.generate(call.prompt, call.sampling, **call.blending))

    @llm_completion_callback()
    def stream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseGen:
        engine = self.open()
        call = self._completion_call(engine, prompt, formatted, kwargs)
        deltas = engine.stream(call.prompt, call.sampling, **call.blending)
        return (call.completion_step(delta) for delta in deltas)

    @llm_completion_callback()
    async def acomplete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponse:
        engine = await self.aopen()
        call = self._completion_call(engine, prompt, formatted, kwargs)
        return call.completion(await engine.agenerate(call.prompt, call.sampling, **call.blending))

    @llm_completion_callback()
    async def astream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseAsyncGen:
        engine = await self.aopen()
        call = self._completion_call(engine, prompt, formatted, kwargs)

        async def steps() -> CompletionResponseAsyncGen:
            async with _closing(
                engine.astream(call.prompt, call.sampling, **call.blending)
            ) as deltas:
                async for delta in deltas:
                    yield call.completion_step(delta)

        return steps()

    # Chat

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        engine = self.open()
        call = self._chat_call(engine, messages, kwargs)
        return call.chat(engine.generate(call.prompt, call.sampling, **call.blending))

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        engine = self.open()
        call = self._chat_call(engine, messages, kwargs)
        deltas = engine.stream(call.prompt, call.sampling, **call.blending)
        return (call.chat_step(delta) for delta in deltas)

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        engine = await self.aopen()
        call = self._chat_call(engine, messages, kwargs)
        return call.chat(await engine.agenerate(call.prompt, call.sampling, **call.blending))

    @llm_chat_callback()
    async def astream_chat(
        self, messages: Sequence[ChatMessage], **kwargs: Any
    ) -> ChatResponseAsyncGen:
        engine = await self.aopen()
        call = self._chat_call(engine, messages, kwargs)

        async def steps() -> ChatResponseAsyncGen:
            async with _closing(
                engine.astream(call.prompt, call.sampling, **call.blending)
            ) as deltas:
                async for delta in deltas:
                    yield call.chat_step(delta)

        return steps()

    # Tools

    @override
    def _prepare_chat_with_tools(
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        verbose: bool = False,
        allow_parallel_tool_calls: bool = False,
        tool_required: bool = False,
        tool_choice: str | dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Return the arguments of a chat call that may, or must, call tools."""
        use = ToolUse.of(tools, tool_choice, tool_required)
        asked = ChatMessage(user_msg) if isinstance(user_msg, str) else user_msg
        messages = [*(chat_history or ()), *([] if asked is None else [asked])]
        given: dict[str, Any] = {"messages": messages, **kwargs}
        if use.tools:
            given |= {"tools": list(use.tools), "tool_choice": use.choice}
            given["parallel_tool_calls"] = allow_parallel_tool_calls
        return given

    def get_tool_calls_from_response(
        self, response: ChatResponse, error_on_no_tool_call: bool = True, **kwargs: Any
    ) -> list[ToolSelection]:
        """Return the tools that a response calls, with their arguments.

        Args:
            response: of a chat with tools.
            error_on_no_tool_call: whether a response that calls none is an error.
            **kwargs: not used.

        Raises:
            ValueError: when it calls none.
            ConfigError: when ``max_tokens`` ended a call before it was whole.
        """
        found = selections(response)
        if error_on_no_tool_call and not found:
            raise ValueError(f"the answer calls no tool: {response.message.content or ''!r:.100}")
        return found

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

    def _turn(
        self, engine: Engine, messages: Sequence[ChatMessage], use: ToolUse
    ) -> Prompt | TurnPrompt:
        """Return messages as the conversation's next turn, which ends with the user's message."""
        prompt = self._chat_prompt(engine, messages)
        if use.tools:
            if refusal := self._refuses_tools(engine):
                raise ConfigError(f"tools: {refusal}")
            prompt = ChatPrompt(cast("list[Any]", prompt), use.tools, use.choice, use.parallel)
        asks = bool(messages) and messages[-1].role is MessageRole.USER
        question = (messages[-1].content or "").strip() if asks else ""
        if self._conversation is None or not question:
            return prompt
        return TurnPrompt(self._conversation, prompt, question)

    def _refuses_tools(self, engine: Engine) -> str | None:
        """Return why prompts cannot show tools, or None."""
        if not engine.has_chat_template:
            return f"{engine.model_name} has no chat template to show them by"
        render = self.messages_to_prompt
        if render is not None and render is not generic_messages_to_prompt:
            return "messages_to_prompt does not show them: leave it out"
        return None

    def _completion_call(
        self, engine: Engine, prompt: str, formatted: bool, kwargs: dict[str, Any]
    ) -> Call:
        wanted = self._wanted(kwargs)
        if wanted.tools.tools:
            raise ConfigError("tools: a completion calls none: ask by chat")
        return wanted.call(self._completion_prompt(engine, prompt, formatted))

    def _chat_call(
        self, engine: Engine, messages: Sequence[ChatMessage], kwargs: dict[str, Any]
    ) -> Call:
        wanted = self._wanted(kwargs)
        return wanted.call(self._turn(engine, messages, wanted.tools))

    def _wanted(self, kwargs: dict[str, Any]) -> Wanted:
        """Lay a call's arguments over the defaults; raises ConfigError on one that is not known."""
        defaults = {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "stop": tuple(self.stop),
        }
        given = {**CALL.told(self.additional_kwargs), **CALL.told(kwargs)}
        return Wanted.of(given, defaults, self.blending)


def _closing(
    deltas: AsyncIterator[Delta],
) -> AbstractAsyncContextManager[AsyncGenerator[Delta, None]]:
    """Stop the work as soon as the reader stops, not at the next garbage collection."""
    return aclosing(cast("AsyncGenerator[Delta, None]", deltas))
