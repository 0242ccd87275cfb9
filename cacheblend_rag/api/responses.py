"""POST /v1/responses, without state: nothing of a response is kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, cast

from pydantic import Field

from cacheblend_rag.api import fields
from cacheblend_rag.api.answers import Asked, Form, event
from cacheblend_rag.api.errors import bad_field
from cacheblend_rag.engines.answer import Delta, Generation, TokenLogprob
from cacheblend_rag.engines.structured import StructuredOutputs
from cacheblend_rag.engines.vllm.refused import ApiError
from cacheblend_rag.text.chat import ChatPrompt, plain_content
from cacheblend_rag.text.tools import ToolCall, ToolChoice

if TYPE_CHECKING:
    from cacheblend_rag.api.collection import Retriever
    from cacheblend_rag.engines.base import Engine

LOGPROBS = "message.output_text.logprobs"
ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
PARTS = ("input_text", "output_text", "text")
STATE = ("previous_response_id", "conversation", "background", "prompt")
"""Fields that need responses to be kept."""
REPEATED = ("instructions", "max_output_tokens", "temperature", "top_p", "metadata")


class TextFormat(fields.JsonSchema):
    """The form of the answer's text."""

    type: Literal["text", "json_object", "json_schema"] = "text"


class TextOptions(fields.Fields):
    """Options of the answer's text."""

    format: TextFormat | None = None


class ResponseRequest(fields.Body):
    """The body of a request for a response."""

    prompt_field: ClassVar[str] = "input"
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

    def asked(self, engine: Engine, retriever: Retriever | None) -> Asked:
        self.check()
        for name in STATE:
            if (self.model_extra or {}).get(name):
                raise bad_field(name, "is not supported: the server keeps nothing; send all input")
        wants_logprobs = self.top_logprobs or LOGPROBS in (self.include or ())
        tools = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(self.tools or [])]
        several = self.parallel_tool_calls is not False
        chat = ChatPrompt(self._messages(), tools, self._chat_choice(), several)
        return self.asked_chat(
            engine,
            retriever,
            chat,
            1,
            max_tokens=self.max_output_tokens,
            logprobs=(self.top_logprobs or 0) if wants_logprobs else None,
            structured_outputs=self._text_form(),
        )

    def form(self, asked: Asked, model: str) -> ResponseForm:
        told = {
            **self.model_dump(include=set(REPEATED)),
            "tools": [{"strict": None, "parameters": None, **tool} for tool in self.tools or []],
            "tool_choice": self.tool_choice or "auto",
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "text": {"format": self._format.model_dump(by_alias=True, exclude_none=True)},
        }
        return ResponseForm(asked, model, told)

    @property
    def _format(self) -> TextFormat:
        return (self.text and self.text.format) or TextFormat()

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
        asked = self._format
        if asked.type == "json_schema" and asked.schema_ is None:
            raise bad_field("text.format.schema", "is missing: give a JSON schema")
        named = {"schema": asked.schema_}
        form = {"type": asked.type, "json_schema": named}
        return StructuredOutputs.of_response_format(form, written_as="text.format")


class ResponseForm(Form):
    """The form of one response; told: fields of the request that it repeats."""

    id_prefix = "resp_"

    def __init__(self, asked: Asked, model: str, told: Mapping[str, Any]) -> None:
        super().__init__(asked, model)
        self._told = told
        self._message_id = self.id.replace("resp", "msg")
        self._events = 0
        self._text: str | None = None  # until a message is opened, which an answer of calls has not

    def whole(self, answers: Sequence[Generation]) -> dict[str, Any]:
        (answer,) = answers
        text = answer.content + self.asked.closing
        output = [self._message(text, answer)] if text or not answer.tool_calls else []
        return self._ended(answer, [*output, *map(_call_item, answer.tool_calls)])

    def beginning(self) -> list[bytes]:
        begun = self._response("in_progress", [])
        return [
            self._event(f"response.{one}", response=begun) for one in ("created", "in_progress")
        ]

    def of_piece(self, index: int, delta: Delta) -> list[bytes]:
        answer, sent = delta.generation, list[bytes]()
        more = delta.content + (self.asked.closing if answer else "")
        if self._text is None and (more or (answer and not answer.tool_calls)):
            self._text = ""
            sent += self._opening()
        if self._text is not None and (more or delta.logprobs):
            self._text += more
            logprobs = _logprobs(delta.logprobs)
            sent.append(self._text_event("delta", delta=more, logprobs=logprobs))
        return sent

    def ending(self, answers: Sequence[Generation]) -> list[bytes]:
        (answer,) = answers
        sent, output = list[bytes](), list[dict[str, Any]]()
        if self._text is not None:
            output.append(self._message(self._text, answer))
            sent += self._closing(output[0])
        for call in map(_call_item, answer.tool_calls):
            sent += self._called(call, len(output))
            output.append(call)
        ended = self._ended(answer, output)
        return [*sent, self._event(f"response.{ended['status']}", response=ended)]

    def failure(self, error: ApiError) -> list[bytes]:
        told = error.body()["error"]
        named = {name: told[name] for name in ("message", "code", "param")}
        return [self._event("error", **named)]

    def _event(self, kind: str, **told: Any) -> bytes:
        sent = event({"type": kind, "sequence_number": self._events, **told}, kind)
        self._events += 1
        return sent

    def _text_event(self, what: str, **told: Any) -> bytes:
        return self._event(f"response.output_text.{what}", **self._place, **told)

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self._message_id, "output_index": 0, "content_index": 0}

    def _opening(self) -> Iterator[bytes]:
        item = self._message("", None)
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        yield self._event("response.output_item.added", output_index=0, item=item)
        yield self._event("response.content_part.added", **self._place, part=part)

    def _closing(self, message: Mapping[str, Any]) -> Iterator[bytes]:
        (part,) = message["content"]
        yield self._text_event("done", text=part["text"], logprobs=part["logprobs"])
        yield self._event("response.content_part.done", **self._place, part=part)
        yield self._event("response.output_item.done", output_index=0, item=message)

    def _called(self, item: Mapping[str, Any], index: int) -> Iterator[bytes]:
        where, told = {"item_id": item["id"], "output_index": index}, item["arguments"]
        begun, kind = {**item, "arguments": "", "status": "in_progress"}, "function_call_arguments"
        yield self._event("response.output_item.added", output_index=index, item=begun)
        yield self._event(f"response.{kind}.delta", **where, delta=told)
        yield self._event(f"response.{kind}.done", **where, arguments=told, name=item["name"])
        yield self._event("response.output_item.done", output_index=index, item=item)

    def _message(self, text: str, answer: Generation | None) -> dict[str, Any]:
        """Return the message with the text; answer: None while it is in progress."""
        told = _logprobs((answer and answer.logprobs) or ())
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": told}
        return {
            "id": self._message_id,
            "type": "message",
            "role": "assistant",
            "status": "in_progress" if answer is None else _status(answer),
            "content": [] if answer is None else [part],
        }

    def _ended(self, answer: Generation, output: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the whole response."""
        tokens = len(answer.token_ids)
        cached = {"cached_tokens": answer.report.reused_tokens, "cache_write_tokens": 0}
        why = {"reason": "max_output_tokens"} if answer.finish_reason == "length" else None
        return {
            **self._response(_status(answer), output),
            "incomplete_details": why,
            "usage": {
                "input_tokens": answer.prompt_tokens,
                "input_tokens_details": cached,
                "output_tokens": tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": answer.prompt_tokens + tokens,
            },
            "cacheblend": self.asked.told(answer),
        }

    def _response(self, status: str, output: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self.model,
            "output": output,
            "previous_response_id": None,
            "store": False,
            "usage": None,
            **self._told,
        }


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
    """Return the text of a message; raises PromptError for parts that are none."""
    if isinstance(content, list):
        is_text = [isinstance(part, dict) and part.get("type") in PARTS for part in content]
        parts = zip(content, is_text, strict=True)
        content = [{**part, "type": "text"} if text else part for part, text in parts]
    return plain_content(content, where)


def _tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a tool as chat completions have it; raises ApiError for other kinds."""
    if tool.get("type") != "function":
        raise bad_field(f"{where}.type", "must be 'function': the server runs no tools itself")
    kept = ("name", "description", "parameters", "strict")
    function = {name: tool[name] for name in kept if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _call_item(call: ToolCall) -> dict[str, Any]:
    return {
        "id": f"fc_{call.id}",
        "type": "function_call",
        "call_id": call.id,
        "name": call.name,
        "arguments": call.arguments,
        "status": "completed",
    }


def _logprobs(tokens: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    return [one.to_openai() for one in tokens]


def _status(answer: Generation) -> str:
    return "incomplete" if answer.finish_reason == "length" else "completed"
