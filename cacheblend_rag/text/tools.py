"""Messages and tools in the OpenAI form, and how a chat template is told of them.

A model whose chat template takes no tools reads them as plain text: a system message lists them, a
call is ``<tool_call>`` with JSON, and a result is a user's message with ``<tool_response>``.
"""

from __future__ import annotations

import json
import re
import uuid
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile
from operator import itemgetter
from typing import Any, Literal, TypeAlias

from cacheblend_rag.errors import PromptError
from cacheblend_rag.text.chunk import SEPARATOR
from cacheblend_rag.text.special_tokens import Markers

Message: TypeAlias = Mapping[str, Any]
Tool: TypeAlias = Mapping[str, Any]
ToolChoice: TypeAlias = Literal["auto", "none", "required"] | Mapping[str, Any]
NAME = re.compile(r"[a-zA-Z0-9_.:-]{1,128}")
OPEN, CLOSE = "<tool_call>", "</tool_call>"
INSTRUCTION = (
    "You may call functions to help with the question. Their signatures, one a line:\n"
    "<tools>\n{tools}\n</tools>\n"
    "To call one, answer with its name and arguments as JSON:\n"
    f'{OPEN}\n{{"name": "function", "arguments": {{"argument": "value"}}}}\n{CLOSE}'
)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool, as an answer makes it.

    Args:
        id: names the call; the message with its result repeats it as ``tool_call_id``.
        name: of the tool.
        arguments: JSON text of an object.
    """

    id: str
    name: str
    arguments: str

    def to_openai(self) -> dict[str, Any]:
        """Return the call in the OpenAI form."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


def check_tools(tools: object) -> tuple[Tool, ...]:
    """Return tools as a tuple; raises PromptError when one is malformed or named twice."""
    if isinstance(tools, str | Mapping) or not isinstance(tools, Sequence):
        raise PromptError(f"tools must be a list of {{'type': 'function', ...}}, not {tools!r:.40}")
    names = [_checked_name(tool, f"tools[{i}]") for i, tool in enumerate(tools)]
    if twice := next((name for name, count in Counter(names).items() if count > 1), None):
        raise PromptError(f"tools has two functions of the name {twice!r}: rename one")
    return tuple(tools)


def check_choice(choice: object, tools: Sequence[Tool]) -> None:
    """Raise PromptError unless a ``tool_choice`` is one, and names one of the tools."""
    if choice == "required" and not tools:
        raise PromptError("tool_choice='required' needs tools: give at least one")
    if choice in ("auto", "none", "required"):
        return
    name = named_tool(choice)
    if name is None:
        raise PromptError(
            f"tool_choice={choice!r:.80} must be 'auto', 'none', 'required' or "
            "{'type': 'function', 'function': {'name': ...}}"
        )
    if name not in map(named_tool, tools):
        raise PromptError(f"tool_choice names {name!r:.80}, which is not among the tools")


def named_tool(choice: object) -> str | None:
    """Return the name of the tool that a ``tool_choice`` asks for, None for the words."""
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None


def tool_name(tool: Tool) -> str:
    """Return the name of a checked tool."""
    return str(tool["function"]["name"])


def _checked_name(tool: object, where: str) -> str:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        raise PromptError(f"{where}.type must be 'function'")
    if not isinstance(function, Mapping):
        raise PromptError(f"{where}.function must be {{'name': ..., 'parameters': ...}}")
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise PromptError(
            f"{where}.function.name must be 1 to 128 letters, digits or _.:-, not {name!r:.40}"
        )
    if parameters is not None and not isinstance(parameters, Mapping):
        raise PromptError(f"{where}.function.parameters must be a JSON schema, a mapping")
    return name


class Data:
    """The texts of a chat in which no control token is read.

    Those are the tools' results, and what looks like a control token in the user's messages and in
    tools' descriptions, whose authors may be strangers. Templates are given a placeholder for each,
    so that it is known where the text stands, and the text is there word for word, whatever the
    template does to others, such as JSON's escapes.

    markers: the tokenizer's control tokens. messages, tools: with placeholders.
    """

    def __init__(
        self, messages: Sequence[Message], tools: Sequence[Tool], markers: Markers
    ) -> None:
        self._mark = uuid.uuid4().hex  # so that no text holds a placeholder
        self._placeholder = re.compile(rf"({self._mark}x\d+z)")
        self._markers = markers
        self._texts: dict[str, str] = {}
        self._results: dict[str, None] = {}
        self.messages = [self._told(message) for message in messages]
        self.tools: list[Tool] = [self._guarded(tool) for tool in tools]

    def are_in(self, text: str) -> bool:
        """Whether a rendered text has each result once, in order."""
        found = [place for place in self._placeholder.findall(text) if place in self._results]
        return found == list(self._results)

    def put_into(self, text: str) -> tuple[str, tuple[tuple[int, int], ...]]:
        """Return a text with the data in their places, and (start, end) of each."""
        pieces, data, size = list[str](), list[tuple[int, int]](), 0
        for index, piece in enumerate(self._placeholder.split(text)):
            if index % 2:  # a placeholder
                piece = self._texts[piece]
                data.append((size, size + len(piece)))
            pieces.append(piece)
            size += len(piece)
        return "".join(pieces), tuple(data)

    def _told(self, message: Message) -> Message:
        if is_result(message):
            place = self._place(message["content"])
            self._results[place] = None
            return {**message, "content": place}
        guards = message["role"] == "user" and "content" in message
        return {**message, "content": self._guarded(message["content"])} if guards else message

    def _place(self, text: str) -> str:
        place = f"{self._mark}x{len(self._texts)}z"
        self._texts[place] = text
        return place

    def _guarded(self, value: Any) -> Any:
        """Return a value of JSON with placeholders for the control tokens in its texts."""
        if isinstance(value, Mapping):
            return {self._guarded(name): self._guarded(one) for name, one in value.items()}
        if isinstance(value, list | tuple):
            return [self._guarded(one) for one in value]
        if not isinstance(value, str):
            return value
        pieces, done = list[str](), 0
        for start, end in sorted(self._markers.find(value)):
            if start >= done:
                pieces += [value[done:start], self._place(value[start:end])]
                done = end
        return "".join([*pieces, value[done:]])


def is_result(message: Message) -> bool:
    """Whether a message is the text result of a tool call."""
    return message.get("role") in ("tool", "function") and isinstance(message.get("content"), str)


def speaks_of_tools(message: Message) -> bool:
    """Whether a message is a tool's result or has calls."""
    return is_result(message) or bool(message.get("tool_calls"))


def functions_called(message: Message) -> Iterator[Mapping[str, Any]]:
    """Yield the functions that a message calls, each a mapping with ``name`` and ``arguments``."""
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping):
            yield function


def with_object(call: Any) -> Any:
    """Return a call with its arguments as an object, as templates want them; else as it is."""
    try:
        found = json.loads(call["function"]["arguments"])
    except (TypeError, KeyError, ValueError, RecursionError):
        return call
    return {**call, "function": {**call["function"], "arguments": found}}


def stand_in_order(names: Iterable[str], text: str) -> bool:
    """Whether a text holds each of the names, one after the other; in time linear in both."""
    at = 0
    for name in names:
        found = text.find(name, at)
        if found < 0:
            return False
        at = found + len(name)
    return True


def is_system(message: Message) -> bool:
    """Whether a message is the system's."""
    return bool(message["role"] == "system")


def text_of(message: Message) -> str:
    """Return a message's text; "" without any, as beside calls."""
    return str(message.get("content") or "")


def plain_turns(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    """Return messages without tools: results and calls as text, one turn after the other.

    What tells of the tools stands behind the system messages that they begin with.
    """
    turns = list(map(_plain_turn, messages))
    system = list(takewhile(is_system, turns))
    told = "\n".join(_json(tool["function"]) for tool in tools)
    own = [{"role": "system", "content": INSTRUCTION.replace("{tools}", told)}] if tools else []
    return _merged([*system, *own, *turns[len(system) :]], ("system", "user", "assistant"))


def system_as_user(messages: Sequence[Message], *, but_first: bool) -> list[Message]:
    """Return messages whose system messages are the user's, joined with those beside them.

    but_first: the system messages that they begin with become one, and stay the system's.
    """
    first = len(list(takewhile(is_system, messages))) if but_first else 0
    turns = [{**one, "role": "user"} if is_system(one) else one for one in messages[first:]]
    return _merged([*messages[:first], *turns], ("system", "user"))


def _plain_turn(message: Message) -> dict[str, Any]:
    content = message.get("content")
    if is_result(message):
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    calls = [
        f"{OPEN}\n{_json({key: one.get(key) for key in ('name', 'arguments')})}\n{CLOSE}"
        for one in functions_called(message)
    ]
    turn = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**turn, "content": "\n".join([*([content] if content else []), *calls])}


def _merged(turns: Sequence[Message], roles: Collection[str]) -> list[Message]:
    """Join messages of one of ``roles`` that follow one another, which many templates refuse."""
    done: list[Message] = []
    for role, found in groupby(turns, key=itemgetter("role")):
        group = list(found)
        if role in roles and len(group) > 1:
            joined = SEPARATOR.join(text for one in group if (text := text_of(one)))
            group = [{**group[0], "content": joined}]
        done += group
    return done


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
