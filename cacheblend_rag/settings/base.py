"""The base of settings, a frozen pydantic model; how secrets, sizes and times are read."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, NoReturn, Self

from pydantic import (
    BaseModel,
    ByteSize,
    ConfigDict,
    Field,
    SecretStr,
    TypeAdapter,
    ValidationError,
)

from cacheblend_rag.errors import ConfigError
from cacheblend_rag.settings.options import Arguments, described, names_of

Ratio = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
TIME = r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*"
"""Regular expression for a number with an optional unit."""
SECOND_UNITS: Mapping[str, int] = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}


class Secret(SecretStr):
    """A string that appears in no repr, pickle or traceback with locals."""

    @classmethod
    def of(cls, value: str | Secret | None) -> Secret | None:
        """Return ``value`` as a Secret, and None for None or an empty string."""
        return value if isinstance(value, Secret) else cls(value) if value else None

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled or copied elsewhere. Raises TypeError."""
        raise TypeError("a secret is not pickled: give it again, or by the environment")


def as_tuple(value: Any) -> Any:
    """Return a list as a tuple; other values, such as texts and sets, are unchanged."""
    is_list = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    return tuple(value) if is_list else value


class Settings(BaseModel):
    """The base of all settings. Sizes and times may be given as text: ``"8GiB"``, ``"12h"``.

    Raises:
        ConfigError: for an unknown name, or a value out of range.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        arbitrary_types_allowed=True,
        hide_input_in_errors=True,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )
    _noun: ClassVar[str] = "setting"
    """The kind of a field, as errors name it."""

    def __init__(self, /, **values: Any) -> None:
        known = Arguments(self._noun, names_of(type(self))).read(values)
        problem = ""
        try:
            super().__init__(**known)
        except ConfigError as error:
            problem = str(error)
        except ValidationError as error:
            errors = error.errors(include_url=False, include_input=False)
            name = str(errors[0]["loc"][0])
            told = [one["msg"] for one in errors if one["loc"][0] == name]
            shown = type(self).model_fields[name].title or name
            problem = described(f"{shown}={known[name]!r:.100}", told)
        if problem:
            raise ConfigError(problem)  # outside of except: no error in its context holds a value

    @classmethod
    def of(cls, value: Self | Mapping[str, Any] | None) -> Self:
        """Return settings from plain values (JSON, TOML), unchanged settings, or the defaults for
        None.

        Raises:
            ConfigError: for an unknown name, or a value out of range.
        """
        if isinstance(value, cls):
            return value
        if not isinstance(value, Mapping | None):
            raise ConfigError(f"settings must be named values, not of type {type(value).__name__}")
        return cls(**(value or {}))

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return self.model_dump(mode="json")

    def with_changes(self, **changes: Any) -> Self:
        """Return a copy with some fields replaced, validated again."""
        given = {name: getattr(self, name) for name in self.model_fields_set}
        return type(self)(**{**given, **changes})

    def with_given(self, **changes: Any) -> Self:
        """Return a copy as ``with_changes`` does; changes that are None were not given."""
        return self.with_changes(**{n: value for n, value in changes.items() if value is not None})


def read_bytes(name: str, value: object) -> int | None:
    """Return a size in bytes; text may name a unit, such as ``"8GiB"``. Raises ConfigError."""
    if isinstance(value, str):
        try:
            return int(TypeAdapter(ByteSize).validate_python(value))
        except ValidationError:
            raise ConfigError(f"{name}={value!r:.100} must be a size, such as 8GiB") from None
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(f"{name}={value!r} must be an integer of at least 0")
    return value


def read_seconds(name: str, value: object) -> float | None:
    """Return a time above 0 in seconds; text may name a unit, as ``"12h"``. Raises ConfigError."""
    if isinstance(value, str):
        found = re.fullmatch(TIME, value)
        unit = SECOND_UNITS.get(found[2].lower()) if found else None
        if found is None or unit is None:
            raise ConfigError(f"{name}={value!r:.100} must be a time, such as 12h")
        value = float(found[1]) * unit
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ConfigError(f"{name}={value!r:.100} must be a number above 0")
    return value


def size(nbytes: int) -> str:
    """Format a number of bytes with a binary unit, such as ``"1.5 MiB"``."""
    return ByteSize(nbytes).human_readable(separator=" ")
