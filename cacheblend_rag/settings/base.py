"""The base of settings, a frozen pydantic model, and kinds of values that several settings take."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Any, ClassVar, NoReturn, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    SecretStr,
    TypeAdapter,
    ValidationError,
)

from cacheblend_rag.errors import ConfigError, describe_errors
from cacheblend_rag.settings.options import Arguments, names_of

N = TypeVar("N", int, float)

_SIZE = TypeAdapter(ByteSize)
_TIME = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([smhd]?)\s*", re.IGNORECASE)
_SECONDS: Mapping[str, int] = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}


def _bytes(value: object) -> object:
    try:
        return int(_SIZE.validate_python(value)) if isinstance(value, str) else value
    except ValidationError:
        raise ValueError("must be a size, such as 8GiB") from None


def _seconds(value: object) -> object:
    if not isinstance(value, str):
        return value
    found = _TIME.fullmatch(value)
    if found is None:
        raise ValueError("must be a time, such as 12h")
    return float(found[1]) * _SECONDS[found[2].lower()]


Ratio = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Flag = Annotated[bool, Field(strict=False)]
"""A boolean, or a text for one: ``"true"``, ``"no"``, ``"1"``, ..."""
Bytes = Annotated[int, Field(ge=0), BeforeValidator(_bytes)]
"""A size in bytes, or a text with a unit, such as ``"8GiB"``."""
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False), BeforeValidator(_seconds)]
"""A time in seconds, or a text with a unit, such as ``"12h"``."""


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


def rising(values: tuple[N, ...]) -> tuple[N, ...]:
    """Return the numbers; raises ValueError unless each is larger than the one before it."""
    if any(b <= a for a, b in pairwise(values)):
        raise ValueError("must be strictly rising")
    return values


AsTuple, Rising = BeforeValidator(as_tuple), AfterValidator(rising)
"""Of a tuple's field: it may be given as a list, and its numbers must rise."""


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
        try:
            super().__init__(**known)
        except ConfigError as error:
            problem = str(error)
        except ValidationError as error:
            errors = error.errors(include_url=False, include_input=False)
            problem = describe_errors(errors, lambda name: self._shown(name, known[name]))
        else:
            return
        raise ConfigError(problem)  # outside of except: no error in its context holds a value

    @classmethod
    def _shown(cls, name: str, value: Any) -> str:
        return f"{cls.model_fields[name].title or name}={value!r:.100}"

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

    def given(self) -> dict[str, Any]:
        """Return the fields that were given, by name."""
        return {name: getattr(self, name) for name in self.model_fields_set}

    def with_changes(self, **changes: Any) -> Self:
        """Return a copy with some fields replaced, validated again."""
        return type(self)(**{**self.given(), **changes})

    def with_given(self, **changes: Any) -> Self:
        """Return a copy as ``with_changes`` does; changes that are None were not given."""
        return self.with_changes(**{n: value for n, value in changes.items() if value is not None})


class CheckedOptions(BaseModel):
    """Options of a class that is no setting. Raises ConfigError as Settings do."""

    _inside: ClassVar[Mapping[str, type[Any]]] = {}
    """Options that are settings themselves; their fields are not options of their own."""

    def __init__(self, **options: Any) -> None:
        try:
            super().__init__(**self._read(options))
        except ValidationError as error:
            raise ConfigError(describe_errors(error.errors(include_input=False))) from None

    @classmethod
    def _read(cls, options: dict[str, Any]) -> dict[str, Any]:
        """Return options by their own names; raises ConfigError for unknown ones."""
        return Arguments(f"option of {cls.__name__}", cls._names(), cls._inside).read(options)

    @classmethod
    def _names(cls) -> frozenset[str]:
        """Return the names that options are given by."""
        aliases = (one.alias for one in cls.model_fields.values() if one.alias)
        return frozenset((*cls.model_fields, *aliases))


def size(nbytes: int) -> str:
    """Format a number of bytes with a binary unit, such as ``"1.5 MiB"``."""
    return ByteSize(nbytes).human_readable(separator=" ")
