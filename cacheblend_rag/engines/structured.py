"""Structured outputs: the forms that an answer may be held to."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from cacheblend_rag.errors import ConfigError


@dataclass(frozen=True)
class StructuredOutputs:
    """The form that an answer must have; exactly one field is given. Fields are vLLM's.

    An answer that ``max_tokens`` or ``stop`` cuts off may be unfinished.

    Args:
        json: a JSON schema, a mapping or its text. The answer is compact JSON.
        regex: a regular expression that the whole answer matches.
        choice: the answer is one of these texts.
        grammar: a Lark grammar with the rule ``start``.
        json_object: True: any JSON object.

    Raises:
        ConfigError: when not exactly one is given, or one is malformed.
    """

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

    def _check_json(self) -> None:
        """Keep the schema as its text, so that equal ones are compared and hashed as equal."""
        schema: Any = self.json
        try:
            found = json.loads(schema) if isinstance(schema, str) else schema
            if not isinstance(found, Mapping | bool):
                raise ConfigError("structured_outputs.json must be a JSON schema: a mapping")
            text = schema if isinstance(schema, str) else json.dumps(schema, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"structured_outputs.json is not JSON: {error!s:.100}") from error
        object.__setattr__(self, "json", text)

    def _check_choice(self) -> None:
        choice = self.choice
        if isinstance(choice, str) or not isinstance(choice, Sequence) or not choice:
            raise ConfigError("structured_outputs.choice must be a non-empty list of strings")
        if not all(isinstance(one, str) and one for one in choice):
            raise ConfigError("structured_outputs.choice must hold non-empty strings")
        object.__setattr__(self, "choice", tuple(choice))
