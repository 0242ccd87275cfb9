"""A JSON value and where it stands, so that an error about it names file and field."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cacheblend_rag.errors import DatasetError


@dataclass(frozen=True)
class Field:
    """A value of a JSON file.

    where: the file, and the names and indices that lead to the value, for errors.
    """

    value: Any
    where: str

    def fail(self, wanted: str) -> DatasetError:
        """Return the error that says what the value must be."""
        return DatasetError(f"{self.where} must be {wanted}")

    def field(self, name: str, default: Any = None) -> Field:
        """Return a field of an object; it must be there unless it has a default.

        Raises DatasetError.
        """
        if not isinstance(self.value, Mapping):
            raise self.fail("an object")
        if name not in self.value and default is None:
            raise DatasetError(f"{self.where}: {name} is missing")
        return Field(self.value.get(name, default), f"{self.where}: {name}")

    def items(self, *, minimum: int = 1) -> list[Field]:
        """Return a list's values; raises DatasetError."""
        if not isinstance(self.value, list) or len(self.value) < minimum:
            raise self.fail(f"a list of at least {minimum}")
        return [Field(item, f"{self.where}[{i}]") for i, item in enumerate(self.value)]

    def each(self, name: str) -> list[Field]:
        """Return the values of an object's list, of which there is at least one.

        Raises DatasetError.
        """
        return self.field(name).items()

    def pair(self, wanted: str) -> tuple[Field, Field]:
        """Return both items of a list that must have two; raises DatasetError."""
        found = self.items(minimum=2)
        if len(found) != 2:
            raise self.fail(wanted)
        return found[0], found[1]

    def texts(self, *, minimum: int = 1) -> tuple[str, ...]:
        """Return a list of strings that are not empty; raises DatasetError."""
        return tuple(item.text() for item in self.items(minimum=minimum))

    def text(self, *, empty: bool = False) -> str:
        """Return a string; raises DatasetError."""
        if not isinstance(self.value, str) or not (empty or self.value):
            raise self.fail("a string" if empty else "a non-empty string")
        return self.value

    def flag(self) -> bool:
        """Return true or false; raises DatasetError."""
        if not isinstance(self.value, bool):
            raise self.fail("true or false")
        return self.value

    def index(self, length: int) -> int:
        """Return an index into something of this length; raises DatasetError."""
        if isinstance(self.value, bool) or not isinstance(self.value, int):
            raise self.fail("an integer")
        if not 0 <= self.value < length:
            raise self.fail(f"an index from 0 to {length - 1}")
        return self.value
