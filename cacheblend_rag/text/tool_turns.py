"""Tools in chat messages: what they are, calls of them, and their results.

A model whose chat template takes no tools reads them as plain text: a system message lists them, a
call is ``<tool_call>`` with JSON, and a result is a user's message with ``<tool_response>``.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby, takewhile
from operator import itemgetter
from typing import Any

from cacheblend_rag.text.special_tokens import Markers
from cacheblend_rag.text.tools import Message, Tool

SEPARATOR = "\n\n"
OPEN, CLOSE = "<tool_call>", "</tool_call>"
INSTRUCTION = (
    "You may call functions to help with the question. Their signatures, one a line:\n"
    "<tools>\n{tools}\n</tools>\n"
    "To call one, answer with its name and arguments as JSON:\n"
    f'{OPEN}\n{{{{"name": "function", "arguments": {{{{"argument": "value"}}}}}}}}\n{CLOSE}'
)


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
        self._markers = markers
        self._texts: dict[str, str] = {}
        self._results: list[str] = []
        self.messages = [self._told(message) for message in messages]
        self.tools: list[Tool] = [self._guarded(tool) for tool in tools]

    def are_in(self, text: str) -> bool:
        """Whether a rendered text has each result once."""
        return sorted(re.findall(rf"result{self._mark}\d+z", text)) == sorted(self._results)

    def put_into(self, text: str) -> tuple[str, tuple[tuple[int, int], ...]]:
        """Return a text with the data in their places, and (start, end) of each."""
        done, pieces, data = 0, list[str](), list[tuple[int, int]]()
        size = 0
        for found in re.finditer(rf"(?:result|token){self._mark}\d+z", text):
            at, own = found.start(), self._texts[found[0]]
            pieces += [text[done:at], own]
            size += at - done
            data.append((size, size + len(own)))
            done, size = found.end(), size + len(own)
        return "".join([*pieces, text[done:]]), tuple(data)

    def _told(self, message: Message) -> Message:
        if is_result(message):
            self._results.append(self._place("result", str(message["content"])))
            return {**message, "content": self._results[-1]}
        guards = message["role"] == "user" and "content" in message
        return {**message, "content": self._guarded(message["content"])} if guards else message

    def _place(self, kind: str, text: str) -> str:
        place = f"{kind}{self._mark}{len(self._texts)}z"
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
                pieces += [value[done:start], self._place("token", value[start:end])]
                done = end
        return "".join([*pieces, value[done:]])


def is_result(message: Message) -> bool:
    """Whether a message is what a tool said."""
    return message.get("role") in ("tool", "function") and isinstance(message.get("content"), str)


def speaks_of_tools(message: Message) -> bool:
    """Whether a message is a tool's result or has calls."""
    return is_result(message) or bool(message.get("tool_calls"))


def called(message: Message) -> Iterator[str]:
    """Yield the names of the functions that a message calls."""
    for function in _functions(message):
        yield str(function.get("name"))


def stand_in_order(names: Iterable[str], text: str) -> bool:
    """Whether a text holds each of the names, one after the other; in time linear in both."""
    at = 0
    for name in names:
        found = text.find(name, at)
        if found < 0:
            return False
        at = found + len(name)
    return True


def with_objects(message: Message) -> Message:
    """Return a message whose calls have arguments as objects, as templates want them."""
    calls = message.get("tool_calls")
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        return message
    return {**message, "tool_calls": [_with_object(call) for call in calls]}


def instruction(tools: Sequence[Tool]) -> str:
    """Return the system message that tells of tools; "" without any."""
    if not tools:
        return ""
    return INSTRUCTION.format(tools="\n".join(_json(tool["function"]) for tool in tools))


def plain_turns(messages: Sequence[Message], instructed: str) -> list[Message]:
    """Return messages without tools: results and calls as text, one turn after the other.

    instructed: is put behind the text of the system messages that they begin with.
    """
    first = [{"role": "system", "content": instructed}] if instructed else []
    turns = list(map(_plain_turn, messages))
    system = list(takewhile(is_system, turns))
    return _merged([*system, *first, *turns[len(system) :]], ("system", "user", "assistant"))


def is_system(message: Message) -> bool:
    """Whether a message is the system's."""
    return bool(message["role"] == "system")


def text_of(message: Message) -> str:
    """Return a message's text; "" without any, as beside calls."""
    return str(message.get("content") or "")


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
        f"{OPEN}\n{_json({'name': one.get('name'), 'arguments': one.get('arguments')})}\n{CLOSE}"
        for one in _functions(with_objects(message))
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


def _functions(message: Message) -> Iterator[Mapping[str, Any]]:
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, Sequence) and not isinstance(calls, str) else ():
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping):
            yield function


def _with_object(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    told = function.get("arguments") if isinstance(function, Mapping) else None
    if not isinstance(told, str):
        return call
    try:
        found = json.loads(told)
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**call["function"], "arguments": found}}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
