"""Finds calls of tools in an answer, whichever of the common forms the model writes them in.

A call is JSON, or a name and its arguments, behind a mark. Behind no mark but the answer's
beginning, and in a fence, JSON may be something else: there it must name one of the tools. The
places where calls may begin are the same in a whole answer as in one that is still written.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Collection, Iterator
from itertools import islice
from typing import Any

import regex

from cacheblend_rag.text.tools import NAME, ToolCall

MARKS = ("<tool_call>", "[TOOL_CALLS]", "<|python_tag|>")
"""What models write before a call: Hermes, Qwen and untrained ones; Mistral; Llama."""
OPENING = regex.compile("|".join(map(re.escape, (*MARKS, "```json"))))
BLANKS = r"\s{0,99}+"
"""White space, bounded, since a stream's end is searched again with each new piece."""


def _key(name: str) -> str:
    """Return the pattern of a key in JSON, whose letters may be escaped."""
    return "".join(rf"(?:{letter}|(?i:\\u00{ord(letter):x}))" for letter in name) + '"'


KEYED = regex.compile(
    rf'[\s,;]{{0,99}}+(?:\[{BLANKS})?\{{{BLANKS}"'
    rf'(?:{_key("name")}{BLANKS}:{BLANKS}"(?P<name>[^"]{{0,128}})|'
    rf"{'|'.join(map(_key, ('type', 'id', 'arguments', 'parameters')))})"
)
"""How a JSON call begins, or a JSON list of calls, as far as the name if that is the first key."""
NAMED = regex.compile(r"[\s,;]{0,99}+(?P<name>[a-zA-Z0-9_.:-]{0,128})")
"""A tool's name right before its arguments, or another word."""
ARGUMENTS_BEGIN = regex.compile(rf"(?:\[ARGS\])?{BLANKS}\{{")
CUT = regex.compile(
    rf'{BLANKS}\{{{BLANKS}"name"{BLANKS}:{BLANKS}"(?P<name>{NAME.pattern})"'
    rf'(?:{BLANKS},{BLANKS}"arguments"{BLANKS}:{BLANKS}(?P<arguments>.*))?',
    regex.DOTALL,
)
"""A JSON call as far as it goes."""
CLOSING = re.compile(r"\s*(?:</tool_call>|```)")
BEFORE = re.compile(rf"[\s,;]*(?:(?P<name>{NAME.pattern})(?:\[ARGS\])?\s*(?=\{{))?")
"""What may stand before a JSON value: separators, and a tool's name before its arguments."""
MOST_OPENINGS = 1000
"""Most places of an answer that are searched for calls, which bounds the time."""
ARGUMENTS = ("arguments", "parameters")
ID_CHARACTERS = 9
"""Letters and digits of a call's id: as many as Mistral's chat templates insist on."""


def find_calls(
    text: str, known: Collection[str], *, is_json: bool = False
) -> tuple[str, tuple[ToolCall, ...]]:
    """Return an answer without its calls, and the calls; all of the text if there are none.

    known: the names of the tools. is_json: whether the answer was held to JSON, so that calls
    are plain JSON. The time is linear in the text's length.
    """
    pieces, calls = list[str](), list[ToolCall]()
    kept = 0  # where content that is not in a piece begins
    for start, at, is_marked in islice(_openings(text, 0, known, is_json), MOST_OPENINGS):
        if start < kept:  # in the arguments of a call
            continue
        read, end = _calls_at(text, at, None if is_marked else known)
        if read:
            pieces.append(text[kept:start])
            calls += read
            kept = end
    if not calls:
        return text, ()
    first, *others = [*pieces, text[kept:]]
    rest = [first.rstrip(), *(one.strip() for one in others)]
    return "\n".join(one for one in rest if one), tuple(calls)


def cut_call(text: str, known: Collection[str]) -> tuple[ToolCall, ...]:
    """Return the plain JSON call that a cut-off answer begins with; none without a whole name.

    Its arguments are JSON text as far as they go. known: the names of the tools.
    """
    found = CUT.match(text)
    if found is None or found["name"] not in known:
        return ()
    return (ToolCall(uuid.uuid4().hex[:ID_CHARACTERS], found["name"], found["arguments"] or ""),)


class ContentStream:
    """Streams an answer without its calls.

    Text is passed on up to the first place where calls begin, or may begin; the rest waits until
    the answer is complete. known: the names of the tools. is_json: as for ``find_calls``.
    """

    def __init__(self, known: Collection[str], *, is_json: bool = False) -> None:
        self._known, self._is_json = known, is_json
        self._text, self._shown = "", 0
        self._begun = 0  # where calls may begin
        self._is_over = False

    def feed(self, piece: str, *, is_call: bool = False) -> str:
        """Add a piece; return what may be shown now.

        is_call: whether a call begins in it, by a mark that decoding has left out of its text.
        """
        self._is_over = self._is_over or is_call
        if self._is_over:
            return ""
        self._text += piece
        openings = _openings(self._text, self._begun, self._known, self._is_json)
        self._begun, *_ = next(openings, (len(self._text),))
        shown = self._text[self._shown : self._begun].rstrip()
        self._shown += len(shown)
        return shown

    def finish(self, content: str) -> str:
        """Return the rest of the content, given all of it."""
        return content[self._shown :] if content.startswith(self._text[: self._shown]) else ""


def _openings(
    text: str, at: int, known: Collection[str], is_json: bool
) -> Iterator[tuple[int, int, bool]]:
    """Yield where calls begin, or may begin at the text's end.

    Each is its start, where its JSON begins, and whether it is behind a mark. at: where the search
    begins.
    """
    if at == 0 and _is_plain(text, 0, known):
        yield 0, 0, False
    for found in () if is_json else OPENING.finditer(text, at, partial=True):
        is_marked = found.partial or found[0] in MARKS
        if is_marked or _is_plain(text, found.end(), known):
            yield found.start(), found.end(), is_marked


def _is_plain(text: str, at: int, known: Collection[str]) -> bool:
    """Whether a call without a mark begins at a place, or may begin there at the text's end."""
    keyed = KEYED.match(text, at, partial=True)
    if keyed and (keyed.partial or keyed["name"] is None or "\\" in keyed["name"]):
        return True
    found = keyed or NAMED.match(text, at)
    name, end = found["name"], found.end()
    if end == len(text):
        return any(one.startswith(name) for one in known)
    return name in known and bool(keyed or ARGUMENTS_BEGIN.match(text, end, partial=True))


def _calls_at(text: str, at: int, known: Collection[str] | None) -> tuple[list[ToolCall], int]:
    """Return the calls at a place in a text, and where they end; known: the names that count."""
    calls, end = list[ToolCall](), at
    for value, after in _values(text, at):
        found = [_call(one, known) for one in (value if isinstance(value, list) else [value])]
        if not found or None in found:
            break
        calls += [one for one in found if one is not None]
        end = after
    closing = CLOSING.match(text, end)
    return calls, end if closing is None else closing.end()


def _call(value: Any, known: Collection[str] | None) -> ToolCall | None:
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
    if not isinstance(told, dict):
        return None
    return ToolCall(uuid.uuid4().hex[:ID_CHARACTERS], name, _written(told))


def _written(arguments: dict[str, Any]) -> str:
    """Return arguments as JSON text that can be sent anywhere."""
    told = json.dumps(arguments, ensure_ascii=False)
    try:
        told.encode()
    except UnicodeEncodeError:  # half a surrogate pair, which JSON can only escape
        return json.dumps(arguments)
    return told


def _values(text: str, at: int) -> Iterator[tuple[Any, int]]:
    """Yield the JSON values at a place in a text, and where each ends."""
    while found := BEFORE.match(text, at):
        value, at = _read(text, found.end())
        if at < 0:
            return
        name = found["name"]
        yield (value if name is None else {"name": name, "arguments": value}), at


def _not_json(constant: str) -> None:
    raise ValueError(constant)


_decoder = json.JSONDecoder(parse_constant=_not_json)


def _read(text: str, at: int = 0) -> tuple[Any, int]:
    """Return the JSON value at a place in a text, and its end; -1 if there is none."""
    try:
        return _decoder.raw_decode(text, at)
    except (ValueError, RecursionError):
        return None, -1
