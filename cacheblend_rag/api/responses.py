"""POST /v1/responses, without state: nothing of a response is kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, cast

from pydantic import Field

from cacheblend_rag.api import fields
from cacheblend_rag.api.answers import Asked
from cacheblend_rag.api.errors import bad_field
from cacheblend_rag.api.response_form import ResponseForm
from cacheblend_rag.api.serving import Serving
from cacheblend_rag.engines.structured import StructuredOutputs
from cacheblend_rag.text.chat import ChatPrompt
from cacheblend_rag.text.tools import ToolChoice

LOGPROBS = "message.output_text.logprobs"
ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
PARTS = ("input_text", "output_text", "text")
STATE = ("previous_response_id", "conversation", "background", "prompt")
"""Fields that need responses to be kept."""
REPEATED = ("instructions", "max_output_tokens", "temperature", "top_p", "metadata")


class TextFormat(fields.Fields):
    """The form of the answer's text."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")


class TextOptions(fields.Fields):
    """Options of the answer's text."""

    format: TextFormat | None = None


class ResponseRequest(fields.Body):
    """The body of a request for a response."""

    input: str | Annotated[list[dict[str, Any]], Field(max_length=fields.MOST_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    top_logprobs: int | None = Field(default=None, ge=0, le=20)
    include: list[str] | None = None
    tools: list[dict[str, Any]] | None = Field(default=None, max_length=fields.MOST_TOOLS)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    metadata: dict[str, str] | None = None

    def check(self) -> None:
        """Raise ApiError for a field that the server lacks."""
        super().check()
        for name in STATE:
            if (self.model_extra or {}).get(name):
                raise bad_field(name, "is not supported: the server keeps nothing; send all input")

    async def asked(self, serving: Serving) -> Asked:
        """Return the prompts and settings for the engine."""
        wants_logprobs = self.top_logprobs or LOGPROBS in (self.include or ())
        sampling = self.sampling(
            max_tokens=self.max_output_tokens,
            logprobs=(self.top_logprobs or 0) if wants_logprobs else None,
            structured_outputs=self._text_form(),
        )
        tools = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(self.tools or [])]
        several = self.parallel_tool_calls is not False
        chat = ChatPrompt(self._messages(), tools, self._chat_choice(), several)
        return await serving.ask_chat(chat, sampling)

    def form(self, model: str) -> ResponseForm:
        """Return what writes the answers as JSON."""
        asked = self.text and self.text.format
        text = asked.model_dump(by_alias=True, exclude_none=True) if asked else {"type": "text"}
        told = {
            **self.model_dump(include=set(REPEATED)),
            "tools": [{"strict": None, "parameters": None, **tool} for tool in self.tools or []],
            "tool_choice": self.tool_choice or "auto",
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "text": {"format": text},
        }
        return ResponseForm(model, told)

    def _chat_choice(self) -> ToolChoice:
        """Return the choice of a tool as chat completions have it."""
        choice = self.tool_choice
        if isinstance(choice, dict) and choice.get("type") == "function" and "name" in choice:
            return {"type": "function", "function": {"name": choice["name"]}}
        return cast(ToolChoice, choice or "auto")

    def _messages(self) -> list[dict[str, Any]]:
        """Return the input as chat messages; raises ApiError."""
        told: list[dict[str, Any]] = []
        if self.instructions:
            told.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*told, {"role": "user", "content": self.input}]
        for index, item in enumerate(self.input):
            _add_item(told, item, f"input[{index}]")
        if not told:
            raise bad_field("input", "is empty: give a text, or a list of messages")
        return told

    def _text_form(self) -> StructuredOutputs | None:
        """Return the form of the text, None for free text; raises ApiError."""
        asked = self.text and self.text.format
        if not asked:
            return None
        if asked.type == "json_schema" and asked.schema_ is None:
            raise bad_field("text.format.schema", "is missing: give a JSON schema")
        named = {"schema": asked.schema_}
        form = StructuredOutputs.of_response_format({"type": asked.type, "json_schema": named})
        return form and form.named("text.format")


def _tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a tool as chat completions have it; raises ApiError for other kinds."""
    if tool.get("type") != "function":
        raise bad_field(f"{where}.type", "must be 'function': the server runs no tools itself")
    kept = ("name", "description", "parameters", "strict")
    function = {name: tool[name] for name in kept if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _add_item(told: list[dict[str, Any]], item: Mapping[str, Any], where: str) -> None:
    """Add an item of the input to the messages."""
    match item.get("type", "message"):
        case "message":
            role = ROLES.get(str(item.get("role")))
            if role is None:
                raise bad_field(f"{where}.role", "must be user, assistant, system or developer")
            content = _content(item.get("content"), f"{where}.content")
            told.append({"role": role, "content": content})
        case "function_call":
            names = ("call_id", "name", "arguments")
            if not all(isinstance(item.get(name), str) for name in names):
                raise bad_field(where, "must have call_id, name and arguments, which are strings")
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            if not told or told[-1]["role"] != "assistant":  # text and calls are one turn
                told.append({"role": "assistant", "content": ""})
            told[-1].setdefault("tool_calls", []).append(call)
        case "function_call_output":
            if not isinstance(item.get("call_id"), str):
                raise bad_field(f"{where}.call_id", "must be the id of a function_call")
            output = _content(item.get("output"), f"{where}.output")
            told.append({"role": "tool", "tool_call_id": item["call_id"], "content": output})
        case "reasoning":
            pass  # which other models may have put there
        case _:
            kinds = "message, function_call, function_call_output or reasoning"
            raise bad_field(f"{where}.type", f"must be {kinds}")


def _content(content: Any, where: str) -> str:
    """Return the text of a message; raises ApiError for parts that are none."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise bad_field(where, "must be a string or a list of parts")
    texts = []
    for index, part in enumerate(content):
        is_text = isinstance(part, dict) and part.get("type") in PARTS
        if not is_text or not isinstance(part.get("text"), str):
            raise bad_field(f"{where}[{index}]", f"must be text, of the type {', '.join(PARTS)}")
        texts.append(part["text"])
    return "\n".join(texts)
