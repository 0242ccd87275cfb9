"""Structured outputs: the forms that an answer may be held to."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self, cast

from cacheblend_rag.errors import ConfigError

ONE_LINE = {"backend": "xgrammar", "disable_any_whitespace": True}
"""vLLM's ``structured_outputs_config`` for JSON without blanks. It must name a backend: vLLM keeps
to the one that it used first, and only xgrammar compiles what its own tool parsers ask for."""
TOLD_CHARACTERS = 200
MOST_DEPTH = 64
"""Mappings and lists within one another, as in a body of the server."""


@dataclass(frozen=True)
class StructuredOutputs:
    """The form that an answer must have; exactly one field is given. Fields are vLLM's.

    An answer that ``max_tokens`` or ``stop`` cuts off may be unfinished. JSON is written in one
    line, by vLLM without blanks, so that no model writes blanks for ever.

    Args:
        json: a JSON schema, a mapping or its text. An object whose schema has ``properties`` has
            no others, unless ``additionalProperties`` says so.
        regex: a regular expression that the whole answer matches.
        choice: the answer is one of these texts.
        grammar: a Lark grammar with the rule ``start``.
        json_object: True: any JSON object.

    Raises:
        ConfigError: when not exactly one is given, or one is malformed.
    """

    written_as: ClassVar[str] = "structured_outputs"
    """What the client called the form, for errors; an object's own, if it was named otherwise."""
    json: Mapping[str, Any] | str | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def __post_init__(self) -> None:
        if self.json_object is False:
            object.__setattr__(self, "json_object", None)
        names = [field.name for field in fields(self)]
        given = [name for name in names if getattr(self, name) is not None]
        if len(given) != 1:
            raise ConfigError(
                f"structured_outputs needs exactly one of {', '.join(names)}, not "
                f"{' and '.join(given) or 'none'}"
            )
        check = {"json": self._check_json, "choice": self._check_choice}.get(given[0])
        if check is not None:
            check()
        elif given[0] == "json_object":
            if self.json_object is not True:
                raise ConfigError("structured_outputs.json_object must be true")
        elif not isinstance(getattr(self, given[0]), str) or not getattr(self, given[0]):
            raise ConfigError(f"structured_outputs.{given[0]} must be a non-empty string")

    @classmethod
    def of_response_format(cls, given: Any) -> Self | None:
        """Return the form that OpenAI's ``response_format`` asks for, None for free text.

        Args:
            given: ``{"type": "text"}``, ``{"type": "json_object"}`` or ``{"type": "json_schema",
                "json_schema": {"schema": ...}}``.

        Raises:
            ConfigError: when it is none of them.
        """
        kind = given.get("type") if isinstance(given, Mapping) else None
        if kind == "text":
            return None
        if kind == "json_object":
            return cls(json_object=True).named("response_format")
        named = given.get("json_schema") if kind == "json_schema" else None
        if isinstance(named, Mapping) and named.get("schema") is not None:
            return cls(json=named["schema"]).named("response_format")
        if kind == "json_schema":
            raise ConfigError("response_format.json_schema.schema is missing: give a JSON schema")
        raise ConfigError(
            f"response_format={given!r:.80} must be {{'type': 'text'}}, {{'type': 'json_object'}} "
            "or {'type': 'json_schema', 'json_schema': {'schema': ...}}"
        )

    def named(self, written_as: str) -> Self:
        """Return the same form, which errors call as the client wrote it."""
        found = copy(self)
        object.__setattr__(found, "written_as", written_as)
        return found

    @property
    def is_json(self) -> bool:
        """Whether the answer is JSON."""
        return self.json is not None or self.json_object is not None

    def to_vllm(self) -> dict[str, Any]:
        """Return the fields of vLLM's own structured outputs."""
        if self.json is not None:
            return {"json": self.schema}
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        told = {name: value for name, value in given.items() if value is not None}
        return {**told, "choice": list(self.choice)} if self.choice is not None else told

    @property
    def schema(self) -> Any:
        """The schema of an answer in JSON, with objects closed."""
        return closed({"type": "object"} if self.json is None else json.loads(str(self.json)))

    def _check_json(self) -> None:
        """Keep the schema as its text, so that equal ones are compared and hashed as equal."""
        schema: Any = self.json
        try:
            found = json.loads(schema) if isinstance(schema, str) else schema
            if not isinstance(found, Mapping | bool):
                raise ConfigError("structured_outputs.json must be a JSON schema: a mapping")
            if is_deep(found):
                raise ConfigError(f"structured_outputs.json has more than {MOST_DEPTH} levels")
            text = schema if isinstance(schema, str) else json.dumps(schema, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"structured_outputs.json is not JSON: {error!s:.100}") from error
        object.__setattr__(self, "json", text)

    def _check_choice(self) -> None:
        choice = self.choice
        if isinstance(choice, str) or not isinstance(choice, Sequence) or not choice:
            raise ConfigError("structured_outputs.choice must be a non-empty list of strings")
        if not all(isinstance(one, str) and one for one in choice):
            raise ConfigError("structured_outputs.choice must hold non-empty strings")
        object.__setattr__(self, "choice", tuple(choice))


def form_refused(form: StructuredOutputs, why: str) -> ConfigError:
    """Return the error of a form that llguidance, or vLLM, refuses."""
    return ConfigError(f"{form.written_as} is refused: {' '.join(why.split())[:TOLD_CHARACTERS]}")


def is_deep(value: Any) -> bool:
    """Whether a JSON value is nested deeper than MOST_DEPTH levels."""
    return any(depth > MOST_DEPTH for _, depth in nodes_in(value))


def nodes_in(value: Any) -> Iterator[tuple[Any, int]]:
    """Yield all mappings and lists in a JSON value with their depths, without recursion."""
    waiting = [(value, 1)]
    while waiting:
        node, depth = waiting.pop()
        if isinstance(node, Mapping | list):
            yield node, depth
            inner = node.values() if isinstance(node, Mapping) else node
            waiting += [(one, depth + 1) for one in inner if isinstance(one, Mapping | list)]


MAPS = ("properties", "patternProperties", "$defs", "definitions")
"""Keywords of a JSON schema that hold schemas by name."""
LISTS = ("anyOf", "oneOf", "prefixItems")
"""Keywords that hold lists of schemas."""
SINGLE = ("items", "additionalProperties")
"""Keywords that hold one schema."""
MOST_ITEMS, LEAST_ITEMS = 16, 2
CHARACTERS_PER_ITEM = 32
LEAST_CHARACTERS = 16


def closed(schema: Any) -> Any:
    """Return a JSON schema whose objects have no properties but those that it names.

    Objects within ``allOf``, ``not`` and ``if`` stay open, since other parts name properties, too.
    """
    return changed(schema, _closed) if isinstance(schema, Mapping) else schema


def bounded_schema(schema: Mapping[str, Any], characters: int) -> Any:
    """Return the same with bounds where there are none, for a model that would not end by itself.

    characters: of all strings together. Lists have an item for 32 of them, 2 to 16.
    """
    strings = 0

    def counted(one: Mapping[str, Any]) -> Mapping[str, Any]:
        nonlocal strings
        strings += _is_free_string(one)
        return one

    changed(schema, counted)
    most = max(LEAST_CHARACTERS, characters // (strings + 1))
    items = max(LEAST_ITEMS, min(MOST_ITEMS, characters // CHARACTERS_PER_ITEM))

    def bounded(one: Mapping[str, Any]) -> Mapping[str, Any]:
        if _is_free_string(one):
            return {"maxLength": max(most, _least(one, "minLength")), **one}
        if "array" in _types(one):
            return {"maxItems": max(items, _least(one, "minItems")), **one}
        return one

    return changed(schema, bounded)


def changed(
    schema: Any, change: Callable[[Mapping[str, Any]], Mapping[str, Any]]
) -> Mapping[str, Any]:
    """Return a schema in which it, and each one within it, was changed."""
    if not isinstance(schema, Mapping):
        return cast(Mapping[str, Any], schema)
    new = dict(schema)
    for name in MAPS:
        if isinstance(schema.get(name), Mapping):
            new[name] = {key: changed(value, change) for key, value in schema[name].items()}
    for name in LISTS:
        if isinstance(schema.get(name), list):
            new[name] = [changed(value, change) for value in schema[name]]
    for name in SINGLE:
        if name in schema:
            new[name] = changed(schema[name], change)
    return change(new)


def _closed(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    if "properties" in schema and "allOf" not in schema:
        return {"additionalProperties": False, **schema}
    return schema


def _least(schema: Mapping[str, Any], name: str) -> float:
    """Return a lower bound of a schema; 0 for what is no number, which the compiler refuses."""
    told = schema.get(name)
    return told if isinstance(told, int | float) else 0


def _types(schema: Mapping[str, Any]) -> Sequence[Any]:
    told = schema.get("type")
    return told if isinstance(told, list) else [told]


def _is_free_string(schema: Mapping[str, Any]) -> bool:
    fixed = ("enum", "const", "pattern", "format")
    return "string" in _types(schema) and not any(name in schema for name in fixed)


# Bounds: what a compiler of grammars takes in seconds and without harm. llguidance bounds most of
# its work by itself, but not how long it reads a long grammar, and it allocates memory for all
# items that an array may have: a single large number would end the process.

LONGEST_FORM = 1 << 18
"""Characters of a schema or of all choices."""
LONGEST_GRAMMAR = 1 << 15
"""Characters of a regular expression, a pattern in a schema, or a grammar."""
MOST_CHOICES = 4096
MOST_PROPERTIES = 1000
"""Properties of one object."""
LARGEST_COUNT = 4096
"""The largest minItems or maxItems."""
MOST_ITEMS_TOGETHER = 50_000
COUNTS = ("minItems", "maxItems")
_OTHER_GRAMMARS = re.compile(r"%\s*(?:json|llguidance)\b")
"""What embeds a schema or another grammar in a Lark grammar, in llguidance only."""


def check_bounds(form: StructuredOutputs) -> None:
    """Raise ConfigError, which names the form as the client wrote it, if it is out of bounds."""
    if form.json is not None:
        _check_length(form, str(form.json), LONGEST_FORM)
        _check_schema_bounds(form, json.loads(str(form.json)))
    if form.choice is not None:
        if len(form.choice) > MOST_CHOICES:
            raise form_refused(form, f"{len(form.choice)} choices are more than {MOST_CHOICES}")
        _check_length(form, "".join(form.choice), LONGEST_FORM)
    for text in (form.regex, form.grammar):
        _check_length(form, text or "", LONGEST_GRAMMAR)
    if form.grammar is not None and (found := _OTHER_GRAMMARS.search(form.grammar)):
        raise form_refused(form, f"{found[0]} in a grammar is not supported: give a schema as json")


def _check_schema_bounds(form: StructuredOutputs, schema: Any) -> None:
    together = 0.0
    for node, _ in nodes_in(schema):
        if not isinstance(node, Mapping):
            continue
        for name in COUNTS:
            count = node.get(name)
            if isinstance(count, int | float) and not isinstance(count, bool):
                if count > LARGEST_COUNT:
                    why = f"{name}={count:g} is more than {LARGEST_COUNT}: lower it"
                    raise form_refused(form, why)
                together += count
        properties, patterns = node.get("properties"), node.get("patternProperties")
        if isinstance(properties, Mapping) and len(properties) > MOST_PROPERTIES:
            why = f"an object has more than {MOST_PROPERTIES} properties: split it"
            raise form_refused(form, why)
        for pattern in (node.get("pattern"), *(patterns if isinstance(patterns, Mapping) else ())):
            if isinstance(pattern, str):
                _check_length(form, pattern, LONGEST_GRAMMAR)
    if together > MOST_ITEMS_TOGETHER:
        raise form_refused(
            form, f"minItems and maxItems are more than {MOST_ITEMS_TOGETHER} together: lower them"
        )


def _check_length(form: StructuredOutputs, text: str, most: int) -> None:
    if len(text) > most:
        raise form_refused(form, f"{len(text)} characters are more than {most}: shorten it")
