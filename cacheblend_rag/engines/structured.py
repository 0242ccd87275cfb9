"""Structured outputs: the forms that an answer may be held to."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, cast

from cacheblend_rag.errors import ConfigError

ONE_LINE = {"backend": "xgrammar", "disable_any_whitespace": True}
"""vLLM's ``structured_outputs_config`` for JSON without blanks. It must name a backend: vLLM keeps
to the one that it used first, and only xgrammar compiles what its own tool parsers ask for."""
TOLD_CHARACTERS = 200
MOST_DEPTH = 64
"""Mappings and lists within one another, as in a body of the server."""
FORMS = ("json", "regex", "choice", "grammar", "json_object")


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
        written_as: what the client calls the form, for errors.

    Raises:
        ConfigError: when not exactly one form is given, or it is malformed.
    """

    json: Mapping[str, Any] | str | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    written_as: str = field(default="structured_outputs", compare=False, repr=False, kw_only=True)

    def __post_init__(self) -> None:
        if self.json_object is False:
            object.__setattr__(self, "json_object", None)
        given = self._given()
        if len(given) != 1:
            raise ConfigError(
                f"structured_outputs needs exactly one of {', '.join(FORMS)}, not "
                f"{' and '.join(given) or 'none'}"
            )
        for name, value in given.items():
            object.__setattr__(self, name, _checked(name, value))

    @classmethod
    def of(cls, given: Any) -> Self:
        """Return a form, or the one whose fields are given; raises ConfigError for all else."""
        if isinstance(given, cls):
            return given
        if not isinstance(given, Mapping):
            raise ConfigError(
                f"structured_outputs is a {type(given).__name__}: give StructuredOutputs(...)"
            )
        for unknown in given.keys() - set(FORMS):
            known = ", ".join(FORMS)
            raise ConfigError(f"structured_outputs.{unknown!s:.40} is unknown: give one of {known}")
        return cls(**given)

    @classmethod
    def of_response_format(cls, given: Any, *, written_as: str = "response_format") -> Self | None:
        """Return the form that OpenAI's ``response_format`` asks for, None for free text.

        Args:
            given: ``{"type": "text"}``, ``{"type": "json_object"}`` or ``{"type": "json_schema",
                "json_schema": {"schema": ...}}``.
            written_as: as for the constructor.

        Raises:
            ConfigError: when it is none of them.
        """
        kind = given.get("type") if isinstance(given, Mapping) else None
        if kind == "text":
            return None
        if kind == "json_object":
            return cls(json_object=True, written_as=written_as)
        named = given.get("json_schema") if kind == "json_schema" else None
        if isinstance(named, Mapping) and named.get("schema") is not None:
            return cls(json=named["schema"], written_as=written_as)
        if kind == "json_schema":
            raise ConfigError("response_format.json_schema.schema is missing: give a JSON schema")
        raise ConfigError(
            f"response_format={given!r:.80} must be {{'type': 'text'}}, {{'type': 'json_object'}} "
            "or {'type': 'json_schema', 'json_schema': {'schema': ...}}"
        )

    @property
    def is_json(self) -> bool:
        """Whether the answer is JSON."""
        return self.json is not None or self.json_object is not None

    @property
    def schema(self) -> Any:
        """The schema of an answer in JSON, with objects closed."""
        return closed({"type": "object"} if self.json is None else json.loads(str(self.json)))

    def to_vllm(self) -> dict[str, Any]:
        """Return the fields of vLLM's own structured outputs."""
        if self.json is not None:
            return {"json": self.schema}
        return {name: list(v) if name == "choice" else v for name, v in self._given().items()}

    def refused(self, why: str) -> ConfigError:
        """Return the error that llguidance, or vLLM, refuses the form."""
        told = " ".join(why.split())[:TOLD_CHARACTERS]
        return ConfigError(f"{self.written_as} is refused: {told}")

    def _given(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in FORMS}
        return {name: value for name, value in values.items() if value is not None}


def _checked(name: str, value: Any) -> Any:
    """Return the value of a form as it is kept; raises ConfigError for a malformed one."""
    where = f"structured_outputs.{name}"
    if name == "json":
        return _schema_text(value)
    if name == "choice":
        if isinstance(value, str) or not isinstance(value, Sequence) or not value:
            raise ConfigError(f"{where} must be a non-empty list of strings")
        if not all(isinstance(one, str) and one for one in value):
            raise ConfigError(f"{where} must hold non-empty strings")
        return tuple(value)
    if name == "json_object" and value is not True:
        raise ConfigError(f"{where} must be true")
    if name != "json_object" and (not isinstance(value, str) or not value):
        raise ConfigError(f"{where} must be a non-empty string")
    return value


def _schema_text(schema: Any) -> str:
    """Return a schema as its text, so that equal ones are compared and hashed as equal."""
    where = "structured_outputs.json"
    try:
        found = json.loads(schema) if isinstance(schema, str) else schema
        if not isinstance(found, Mapping | bool):
            raise ConfigError(f"{where} must be a JSON schema: a mapping")
        if is_deep(found):
            raise ConfigError(f"{where} has more than {MOST_DEPTH} levels")
        return schema if isinstance(schema, str) else json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON: {error!s:.100}") from error


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
    nodes = (node for node, _ in nodes_in(schema))
    strings = sum(isinstance(node, Mapping) and _is_free_string(node) for node in nodes)
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
