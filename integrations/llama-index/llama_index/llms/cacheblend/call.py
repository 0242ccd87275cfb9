"""One call of the LLM: its arguments laid over the defaults, and the responses it makes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    CompletionResponse,
    ContentBlock,
    LogProb,
    MessageRole,
    TextBlock,
    ToolCallBlock,
)
from llama_index.core.bridge.pydantic import BaseModel

from cacheblend_rag import (
    Arguments,
    BlendConfig,
    ChatPrompt,
    Chunk,
    ConfigError,
    Delta,
    Generation,
    SamplingParams,
    StructuredOutputs,
    TokenLogprob,
    ToolCall,
    TurnPrompt,
    names_of,
    read_hints,
)
from llama_index.llms.cacheblend.events import Reporter
from llama_index.llms.cacheblend.hints import hints_in
from llama_index.llms.cacheblend.messages import TOOL_CALLS, plain_call
from llama_index.llms.cacheblend.tools import ToolUse

REPORT = "cacheblend"
Prompt = str | list[dict[str, Any]] | ChatPrompt
"""A text, or messages for the model's own chat template, with tools or without."""
SAMPLING = names_of(SamplingParams)
TOOLS = frozenset({"tools", "tool_choice", "tool_required", "parallel_tool_calls"})
BLENDING = frozenset({"blend_config", "recompute_ratio"})
CALL = Arguments(
    "argument of a call",
    SAMPLING | TOOLS | BLENDING | {"hints", "response_format", "top_logprobs"},
    {"blend_config": BlendConfig},
)


@dataclass(frozen=True)
class Wanted:
    """What the arguments of a call ask for.

    hints: None if none are given, so that those of the query at hand are used.
    """

    sampling: SamplingParams
    config: BlendConfig
    hints: tuple[Chunk | str, ...] | None
    tools: ToolUse

    @classmethod
    def of(
        cls, arguments: Mapping[str, Any], defaults: Mapping[str, Any], config: BlendConfig
    ) -> Wanted:
        """Return what is asked for; raises ConfigError, PromptError for an argument that is wrong.

        arguments: by their own names, none of them None. defaults: sampling settings.
        """
        hints = arguments.get("hints")
        sampling = {name: value for name, value in arguments.items() if name in SAMPLING}
        return cls(
            sampling=SamplingParams(**{**defaults, **sampling, **_told(arguments)}),
            config=_config(config, **_only(arguments, BLENDING)),
            hints=None if hints is None else read_hints(hints),
            tools=ToolUse.of(**_only(arguments, TOOLS)),
        )

    def call(self, prompt: Prompt | TurnPrompt) -> Call:
        """Return the call that asks a prompt."""
        return Call(prompt, self)


def _only(arguments: Mapping[str, Any], names: frozenset[str]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if name in names}


def _config(
    config: BlendConfig,
    *,
    blend_config: BlendConfig | dict[str, Any] | None = None,
    recompute_ratio: float | None = None,
) -> BlendConfig:
    if blend_config is not None:
        config = BlendConfig.of(blend_config)
    return config if recompute_ratio is None else config.with_ratio(recompute_ratio)


def _told(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling settings that other libraries write in other ways."""
    told: dict[str, Any] = {}
    if (asked := arguments.get("response_format")) is not None:
        if arguments.get("structured_outputs") is not None:
            raise ConfigError("response_format and structured_outputs name one form: give one")
        told["structured_outputs"] = _response_format(asked)
    most, wanted = arguments.get("top_logprobs"), arguments.get("logprobs")
    if isinstance(wanted, bool):
        told["logprobs"] = (most or 0) if wanted else None
    elif most is not None and wanted is None:
        raise ConfigError("top_logprobs needs logprobs=True")
    return told


def _response_format(asked: Any) -> StructuredOutputs | None:
    """Return the form that OpenAI's ``response_format`` asks for; a pydantic class is a schema."""
    if isinstance(asked, type) and issubclass(asked, BaseModel):
        return StructuredOutputs(json=asked.model_json_schema(), written_as="response_format")
    return StructuredOutputs.of_response_format(asked)


@dataclass(frozen=True)
class Call:
    """One request: what is asked of the engine, and the answer so far."""

    prompt: Prompt | TurnPrompt
    wanted: Wanted
    pieces: list[str] = field(default_factory=list)
    reporter: Reporter = field(default_factory=Reporter)

    @property
    def sampling(self) -> SamplingParams:
        """How the answer is sampled."""
        return self.wanted.sampling

    @property
    def blending(self) -> dict[str, Any]:
        """How KV is fused, and the chunks that the prompt holds."""
        hints = self.wanted.hints
        told = tuple(hints_in(_text(self.prompt))) if hints is None else hints
        return {"config": self.wanted.config, "hints": told}

    def completion(self, generation: Generation) -> CompletionResponse:
        """Return the response of a completion."""
        return CompletionResponse(text=generation.text, **self._told(generation))

    def completion_step(self, delta: Delta) -> CompletionResponse:
        """Return the response so far of a streamed completion."""
        told = self._told(delta.generation) if delta.generation else {}
        return CompletionResponse(text=self._grow(delta.text), delta=delta.text, **told)

    def chat(self, generation: Generation) -> ChatResponse:
        """Return the response of a chat."""
        message = _message(generation.content, generation.tool_calls)
        return ChatResponse(message=message, **self._told(generation))

    def chat_step(self, delta: Delta) -> ChatResponse:
        """Return the response so far of a streamed chat; the last one has the calls of tools."""
        text = self._grow(delta.content)
        if delta.generation is None:
            return ChatResponse(message=_message(text), delta=delta.content)
        return ChatResponse(
            message=_message(text, delta.generation.tool_calls),
            delta=delta.content,
            **self._told(delta.generation),
        )

    def _grow(self, text: str) -> str:
        """Return the answer so far."""
        self.pieces.append(text)
        return "".join(self.pieces)

    def _told(self, generation: Generation) -> dict[str, Any]:
        """Publish the report; return what a response says beside its text."""
        report = generation.report.to_dict()
        self.reporter.publish(report)
        usage = {
            "prompt_tokens": generation.prompt_tokens,
            "completion_tokens": len(generation.token_ids),
            "total_tokens": generation.prompt_tokens + len(generation.token_ids),
            "cached_tokens": generation.report.reused_tokens,
        }
        raw: dict[str, Any] = {
            **usage,
            "usage": usage,
            "finish_reason": generation.openai_finish_reason,
        }
        told: dict[str, Any] = {"raw": raw, "additional_kwargs": {REPORT: report}}
        if generation.logprobs is not None:
            raw["logprobs"] = {"content": [one.to_openai() for one in generation.logprobs]}
            told["logprobs"] = [_logprobs(one) for one in generation.logprobs]
        return told


def _text(prompt: Prompt | TurnPrompt) -> str:
    if isinstance(prompt, TurnPrompt):
        return _text(cast("Prompt", prompt.prompt))
    if isinstance(prompt, str):
        return prompt
    messages = prompt.messages if isinstance(prompt, ChatPrompt) else prompt
    return "\n".join(message["content"] or "" for message in messages)


def _message(text: str, calls: tuple[ToolCall, ...] = ()) -> ChatMessage:
    """Return an assistant's message; calls of tools also in OpenAI's form: LlamaIndex reads it."""
    blocks: list[ContentBlock] = [TextBlock(text=text)] if text or not calls else []
    blocks += [
        ToolCallBlock(tool_call_id=one.id, tool_name=one.name, tool_kwargs=_arguments(one))
        for one in calls
    ]
    plain = [plain_call(one.id, one.name, one.arguments) for one in calls]
    more = {TOOL_CALLS: plain} if plain else {}
    return ChatMessage(role=MessageRole.ASSISTANT, blocks=blocks, additional_kwargs=more)


def _arguments(call: ToolCall) -> dict[str, Any] | str:
    """Return a call's arguments, or their text if that is no JSON object (cut off, say)."""
    try:
        read = json.loads(call.arguments)
    except ValueError:
        return call.arguments
    return read if isinstance(read, dict) else call.arguments


def _logprobs(token: TokenLogprob) -> list[LogProb]:
    """Return the token of the answer, then the most likely others in its place."""
    others = [(text, value) for name, text, value in token.top if name != token.token_id]
    return [
        LogProb(token=text, logprob=value, bytes=list(text.encode()))
        for text, value in [(token.token, token.logprob), *others]
    ]
