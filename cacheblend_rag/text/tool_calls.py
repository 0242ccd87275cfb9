"""Finds calls of tools in an answer, whichever of the common forms the model writes them in."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from cacheblend_rag.text.tools import NAME, ToolCall

ID_CHARACTERS = 9
"""Letters and digits of a call's id: as many as Mistral's chat templates insist on."""
NAMED = re.compile(r"\s*([a-zA-Z0-9_.:-]{1,128})(?:\[ARGS\])?\s*(?=\{)")
"""A name right before its arguments."""
BETWEEN = re.compile(r"[\s,;]*")
ARGUMENTS = ("arguments", "parameters")
FIRST_KEYS = ("name", "type", "id", *ARGUMENTS)
"""What a call in plain JSON begins with."""
WORD = re.compile(r"[a-zA-Z0-9_.:-]+")
BEGUN = re.compile(r"[\s,;]*(\[\s*)?")
OBJECT = re.compile(r'\{\s*(?:"([^"\\]*)("?)(?:\s*:\s*"([^"\\]*)("?))?)?')
"""An object's first key, and its value if that is a text; each with its end if it has no escape."""


@dataclass(frozen=True, slots=True)
class Form:
    """How calls stand in a text.

    opening, closing: the text around them; no opening is the beginning of the answer, no closing is
    its end. known: whether only the names of given tools count, where JSON may be something else.
    """

    opening: str
    closing: str = ""
    known: bool = False


FORMS = (
    Form("<tool_call>", "</tool_call>"),  # Hermes, Qwen, and prompts of plain text
    Form("[TOOL_CALLS]"),  # Mistral
    Form("<|python_tag|>"),  # Llama
    Form("```json", "```", known=True),
    Form("", known=True),
)
PLAIN = FORMS[-1:]
OPENINGS = tuple(form.opening for form in FORMS if form.opening)
MAY_BE_OTHER = frozenset(form.opening for form in FORMS if form.known)
"""The openings behind which JSON need not be a call."""
_opening = re.compile("|".join(map(re.escape, OPENINGS)))

Call = tuple[str, str]
"""A function's name, and its arguments as JSON text."""


def find_calls(
    text: str, known: Collection[str], *, is_json: bool = False
) -> tuple[str, tuple[ToolCall, ...]]:
    """Return an answer without its calls, and the calls; all of the text if there are none.

    known: the names of the tools. is_json: whether the answer was held to JSON, so that calls
    are plain JSON. The time is linear in the text's length.
    """
    for form in PLAIN if is_json else FORMS:
        if form.opening in text:
            rest, calls = _found(text, form, known)
            if calls:
                made = tuple(ToolCall(new_id(), name, told) for name, told in calls)
                return rest, made
    return text, ()


def new_id() -> str:
    """Return the id of a new call."""
    return uuid.uuid4().hex[:ID_CHARACTERS]


def as_call(value: Any, known: Collection[str] | None = None) -> Call | None:
    """Return the call that a JSON value is; None if it is none, or of no known tool."""
    if not isinstance(value, dict):
        return None
    name = value.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        return None
    if known is not None and (name not in known or not any(key in value for key in ARGUMENTS)):
        return None
    told: Any = next((value[key] for key in ARGUMENTS if key in value), {})
    if isinstance(told, str):
        told, _ = _read(told)
    return None if not isinstance(told, dict) else (name, written(told))


def written(arguments: dict[str, Any]) -> str:
    """Return arguments as JSON text that can be sent anywhere."""
    told = json.dumps(arguments, ensure_ascii=False)
    try:
        told.encode()
    except UnicodeEncodeError:  # half a surrogate pair, which JSON can only escape
        return json.dumps(arguments)
    return told


def _found(text: str, form: Form, known: Collection[str]) -> tuple[str, list[Call]]:
    """Return a text without the calls of one form, and the calls."""
    pieces, calls = list[str](), list[Call]()
    kept = done = 0  # where content that is not in a piece begins, and what was searched
    while (at := text.find(form.opening, done)) >= 0:
        begin = at + len(form.opening)
        end = text.find(form.closing, begin) if form.closing else -1
        read, used = _calls_in(
            text[begin : end if end >= 0 else len(text)], known if form.known else None
        )
        done = begin + used if end < 0 else end + len(form.closing)
        if read:
            pieces.append(text[kept:at])
            calls += read
            kept = done
        if end < 0:
            break
    first, *others = [*pieces, text[kept:]]
    rest = [first.rstrip(), *(one.strip() for one in others)]
    return "\n".join(one for one in rest if one), calls


def _calls_in(body: str, known: Collection[str] | None) -> tuple[list[Call], int]:
    """Return the calls that a text begins with, and how many of its characters they take."""
    calls, at = list[Call](), 0
    if known is not None and not may_be_calls(body, known):
        return calls, at
    for value, end in _values(body):
        found = [as_call(one, known) for one in (value if isinstance(value, list) else [value])]
        if not found or None in found:
            break
        calls += [one for one in found if one is not None]
        at = end
    return calls, at


def may_be_calls(text: str, known: Collection[str], at: int = 0) -> bool:
    """Whether a text that may go on begins, or may begin, with calls in plain JSON.

    at: where it begins. A call is told by its first key, and by the name if that is it.
    """
    begun = BEGUN.match(text, at)
    is_list, at = (False, at) if begun is None else (begun[1] is not None, begun.end())
    if at == len(text):
        return True
    if (found := OBJECT.match(text, at)) is not None:
        key, key_end, name, name_end = found.groups()
        if key is None:
            return found.end() == len(text)
        if not key_end:
            return _goes_on(text, found.end(), key, FIRST_KEYS)
        if key != "name" or name is None:
            return key in FIRST_KEYS
        return name in known if name_end else _goes_on(text, found.end(), name, known)
    named = WORD.match(text, at)
    if named is None or is_list:
        return False
    if named.end() == len(text):
        return any(one.startswith(named[0]) for one in known)
    rest = text[named.end() :]
    is_called = "[ARGS]".startswith(rest) or rest.removeprefix("[ARGS]").lstrip()[:1] in ("", "{")
    return named[0] in known and is_called


def _goes_on(text: str, at: int, word: str, words: Collection[str]) -> bool:
    """Whether a JSON string, read up to a place, may become one of some words."""
    return at < len(text) or any(one.startswith(word) for one in words)  # at an escape: whatever


def _values(body: str) -> Iterator[tuple[Any, int]]:
    """Yield the JSON values that a text begins with, and where each ends."""
    at = _skipped(body, 0)
    while at < len(body):
        named = NAMED.match(body, at)
        value, end = _read(body, at if named is None else named.end())
        if end < 0:
            return
        yield (value if named is None else {"name": named[1], "arguments": value}), end
        at = _skipped(body, end)


def _skipped(text: str, at: int) -> int:
    between = BETWEEN.match(text, at)
    return at if between is None else between.end()


def _not_json(constant: str) -> None:
    raise ValueError(constant)


_decoder = json.JSONDecoder(parse_constant=_not_json)


def _read(text: str, at: int = 0) -> tuple[Any, int]:
    """Return the JSON value at a place in a text, and its end; -1 if there is none."""
    try:
        return _decoder.raw_decode(text, at)
    except (ValueError, RecursionError):
        return None, -1


class ContentStream:
    """Tells, of an answer that comes piece by piece, what certainly belongs to no call.

    known: the names of the tools. is_json: as for ``find_calls``.
    """

    def __init__(self, known: Collection[str] = (), *, is_json: bool = False) -> None:
        self.sent = ""
        self._known, self._is_json = known, is_json
        self._held, self._begins, self._is_open = "", True, True

    def feed(self, piece: str) -> str:
        """Add a piece; return what may be shown now."""
        if not self._is_open:
            return ""
        self._held += piece
        if self._begins and may_be_calls(self._held, self._known):
            return ""
        self._begins = False
        shown = self._held[: self._content_end()].rstrip()
        self._held, self.sent = self._held[len(shown) :], self.sent + shown
        return shown

    def _content_end(self) -> int:
        """Return where what may be a call begins; it ends the search if it certainly is one."""
        if self._is_json:
            return len(self._held)
        for found in _opening.finditer(self._held):
            self._is_open = found[0] in MAY_BE_OTHER
            if not self._is_open or may_be_calls(self._held, self._known, found.end()):
                return found.start()
        return len(self._held) - self._pending()

    def finish(self, content: str) -> str:
        """Return what of the whole content was not shown yet."""
        return content[len(self.sent) :] if content.startswith(self.sent) else ""

    def _pending(self) -> int:
        """Length of the longest ending that may grow into an opening."""
        held = self._held
        return max(
            (n for one in OPENINGS for n in range(1, len(one)) if held.endswith(one[:n])),
            default=0,
        )
