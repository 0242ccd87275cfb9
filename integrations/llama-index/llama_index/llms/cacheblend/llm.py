"""CacheBlendLLM: LlamaIndex's LLM interface on an engine that reuses retrieved chunks' KV."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

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
    ToolCallBlock,
)
from llama_index.core.bridge.pydantic import Field, PrivateAttr, field_validator, model_validator
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.llm import ToolSelection, default_completion_to_prompt
from typing_extensions import override

from cacheblend_rag import (
    BlendConfig,
    ChatPrompt,
    ConfigError,
    ConversationKV,
    Engine,
    PromptError,
    TurnPrompt,
)
from llama_index.llms.cacheblend.call import (
    CALL,
    Call,
    Response,
    plain_messages,
    sampling_of,
    tools_of,
)
from llama_index.llms.cacheblend.settings import EngineSettings
from llama_index.llms.cacheblend.structured import StructuredPredictor

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
        given = self._given({})
        sampling_of(given)
        self._config(given)
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
        return self._completion(self.open(), prompt, formatted, kwargs).answer()

    @llm_completion_callback()
    def stream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseGen:
        return self._completion(self.open(), prompt, formatted, kwargs).steps()

    @llm_completion_callback()
    async def acomplete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponse:
        return await self._completion(await self.aopen(), prompt, formatted, kwargs).aanswer()

    @llm_completion_callback()
    async def astream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> CompletionResponseAsyncGen:
        return self._completion(await self.aopen(), prompt, formatted, kwargs).asteps()

    # Chat

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        return self._chat(self.open(), messages, kwargs).answer()

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        return self._chat(self.open(), messages, kwargs).steps()

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        return await self._chat(await self.aopen(), messages, kwargs).aanswer()

    @llm_chat_callback()
    async def astream_chat(
        self, messages: Sequence[ChatMessage], **kwargs: Any
    ) -> ChatResponseAsyncGen:
        return self._chat(await self.aopen(), messages, kwargs).asteps()

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
        given = {"tools": tools, "tool_choice": tool_choice, "tool_required": tool_required}
        told = tools_of({**given, "parallel_tool_calls": allow_parallel_tool_calls})
        asked = ChatMessage(user_msg) if isinstance(user_msg, str) else user_msg
        messages = [*(chat_history or ()), *([] if asked is None else [asked])]
        return {"messages": messages, **kwargs, **told}

    def get_tool_calls_from_response(
        self, response: ChatResponse, error_on_no_tool_call: bool = True, **kwargs: Any
    ) -> list[ToolSelection]:
        """Return the tools that a response calls, with their arguments.

        Raises:
            ValueError: when it calls none, unless that is no error.
            ConfigError: when ``max_tokens`` ended a call before it was whole.
        """
        called = [one for one in response.message.blocks if isinstance(one, ToolCallBlock)]
        is_whole = all(isinstance(one.tool_kwargs, dict) for one in called)
        is_cut = not is_whole or not (called or response.message.content)
        if is_cut and (response.raw or {}).get("finish_reason") == "length":
            raise ConfigError("max_tokens ended the call of a tool: give a higher max_tokens")
        if error_on_no_tool_call and not called:
            raise ValueError(f"the answer calls no tool: {response.message.content or ''!r:.100}")
        return [
            ToolSelection(
                tool_id=one.tool_call_id or "",
                tool_name=one.tool_name,
                tool_kwargs=one.tool_kwargs if isinstance(one.tool_kwargs, dict) else {},
            )
            for one in called
        ]

    # Inside

    def _is_chat(self, engine: Engine) -> bool:
        return engine.has_chat_template if self.is_chat_model is None else self.is_chat_model

    def _refuses_tools(self, engine: Engine) -> str | None:
        """Return why prompts cannot show tools, or None."""
        if not engine.has_chat_template:
            return f"{engine.model_name} has no chat template to show them by"
        if self._renders:
            return "messages_to_prompt does not show them: leave it out"
        return None

    @property
    def _renders(self) -> bool:
        """Whether a function of the user's makes texts of messages."""
        return self.messages_to_prompt not in (None, generic_messages_to_prompt)

    def _completion(
        self, engine: Engine, prompt: str, formatted: bool, kwargs: dict[str, Any]
    ) -> Call[CompletionResponse]:
        """Return a call with the text as it is, in the user's own form, or as a user's message."""
        if not isinstance(prompt, str):
            raise PromptError(f"prompt is a {type(prompt).__name__}: give a text")
        given = self._given(kwargs)
        if given.get("tools"):
            raise ConfigError("tools: a completion calls none: ask by chat")
        asked: Any = prompt
        if not formatted:
            wrap = self.completion_to_prompt
            if wrap is not None and wrap is not default_completion_to_prompt:
                asked = wrap(prompt)
            elif self._is_chat(engine):
                asked = self._messages_prompt(engine, [ChatMessage(prompt)])
        return self._call(CompletionResponse, engine, asked, prompt, given)

    def _chat(
        self, engine: Engine, messages: Sequence[ChatMessage], kwargs: dict[str, Any]
    ) -> Call[ChatResponse]:
        """Return a call with messages; a user's message at the end is the conversation's turn."""
        given = self._given(kwargs)
        prompt = self._messages_prompt(engine, messages)
        if tools := tools_of(given):
            if refusal := self._refuses_tools(engine):
                raise ConfigError(f"tools: {refusal}")
            prompt = ChatPrompt(prompt, **tools)
        asks = bool(messages) and messages[-1].role is MessageRole.USER
        question = (messages[-1].content or "").strip() if asks else ""
        if self._conversation is not None and question:
            prompt = TurnPrompt(self._conversation, prompt, question)
        text = "\n".join(message.content or "" for message in messages)
        return self._call(ChatResponse, engine, prompt, text, given)

    def _messages_prompt(self, engine: Engine, messages: Sequence[ChatMessage]) -> Any:
        """Return messages for the model's own template, or as a text where it has none."""
        if self._renders and self.messages_to_prompt is not None:
            return self.messages_to_prompt(messages)
        if engine.has_chat_template:
            return plain_messages(messages)
        return generic_messages_to_prompt(messages)

    def _call(
        self,
        kind: type[Response],
        engine: Engine,
        prompt: Any,
        text: str,
        given: Mapping[str, Any],
    ) -> Call[Response]:
        sampling, config = sampling_of(given), self._config(given)
        return Call(kind, engine, prompt, text, sampling, config, given.get("hints"))

    def _config(self, given: Mapping[str, Any]) -> BlendConfig:
        own, ratio = given.get("blend_config"), given.get("recompute_ratio")
        config = self.blending if own is None else BlendConfig.of(own)
        return config if ratio is None else config.with_ratio(ratio)

    def _given(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Lay a call's arguments over the defaults; raises ConfigError on one that is not known."""
        own = {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "stop": tuple(self.stop),
        }
        return {**own, **CALL.told(self.additional_kwargs), **CALL.told(kwargs)}
