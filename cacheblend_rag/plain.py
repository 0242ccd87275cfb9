"""Reads dataclasses and options from JSON of untrusted origin: each field has its type's value."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from types import NoneType
from typing import Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.reason import Reason, ReasonCode

T = TypeVar("T")


def read_plain(kind: type[T], sent: Any) -> T:
    """Read a dataclass from plain JSON values; unknown fields, of a newer version, are ignored.

    Reasons are [code, sentence] pairs. Raises ValueError, TypeError or OverflowError.
    """
    if not isinstance(sent, Mapping):
        raise ValueError(f"{kind.__name__} must be an object")
    hints = field_types(kind)  # type: ignore[arg-type]  # a class is hashable
    return kind(**{name: _value(name, hints[name], sent[name]) for name in hints if name in sent})


def read_object(name: str, text: str, example: str) -> dict[str, Any]:
    """Parse a command-line option that is a JSON object; an empty text is an empty object.

    name: of the option. example: a valid value. Raises ConfigError.
    """
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ConfigError(f"{name}={text!r:.60} must be a JSON object, such as {example}")
    return found


@cache
def field_types(kind: type[Any]) -> Mapping[str, Any]:
    """Return a dataclass's fields with their types."""
    hints = get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


def _value(name: str, hint: Any, sent: Any) -> Any:
    """Read a field; raises ValueError unless its value has the type ``hint``."""
    origin, inner = get_origin(hint), get_args(hint)
    if NoneType in inner:
        return None if sent is None else _value(name, inner[0], sent)
    if hint is Reason:
        return _reason(name, sent)
    if is_dataclass(hint):
        return read_plain(cast(type[Any], hint), sent)
    if origin is tuple:
        return tuple(_value(name, inner[0], value) for value in _checked(name, sent, list, tuple))
    if origin is Mapping and inner[0] is Reason:
        return dict(_counted(name, row) for row in _checked(name, sent, list))
    if origin is Mapping:
        named = _checked(name, sent, dict).items()
        return {_checked(name, key, str): _value(name, inner[1], value) for key, value in named}
    if hint is float:
        return _finite(name, _checked(name, sent, float, int))
    return _checked(name, sent, str if origin is Literal else hint)  # others may know more reasons


def _reason(name: str, sent: Any) -> Reason:
    """Read a code, which may be a newer version's, and a sentence."""
    code, sentence = (_checked(name, part, str) for part in _row(name, sent, 2))
    return Reason(ReasonCode.named(code), sentence)


def _counted(name: str, sent: Any) -> tuple[Reason, int]:
    """Read a reason, and its count."""
    row = _row(name, sent, 3)
    return _reason(name, row[:2]), _checked(name, row[2], int)


def _row(name: str, sent: Any, length: int) -> list[Any]:
    row: list[Any] = _checked(name, sent, list)
    if len(row) != length:
        raise ValueError(f"{name} holds {len(row)} values instead of {length}")
    return row


def _finite(name: str, sent: float) -> float:
    if not math.isfinite(sent):
        raise ValueError(f"{name} is no number")
    return float(sent)


def _checked(name: str, sent: Any, *kinds: type[Any]) -> Any:
    if type(sent) not in kinds:
        raise ValueError(f"{name} is a {type(sent).__name__}")
    return sent
