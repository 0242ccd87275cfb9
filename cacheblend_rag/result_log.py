"""A log of results by key, in memory and as JSON lines, from which interrupted work resumes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar

from cacheblend_rag.errors import ConfigError, DatasetError, describe_errors

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Key = Mapping[str, Any]
"""What a result depends on, in plain JSON values."""
ResultT = TypeVar("ResultT", bound="DataclassInstance")


class ResultLog(Generic[ResultT]):
    """Results by key, in memory and, if it has a file, there as JSON lines.

    A line is an object with ``key`` and ``record``. Each is on disk as soon as it is known, so that
    interrupted work can go on; a last line that was not finished is dropped. ``work`` names the
    work in errors, ``kind`` is the dataclass of results.
    """

    work: ClassVar[str]
    kind: ClassVar[type[Any]]

    def __init__(self) -> None:
        self._results: dict[str, ResultT] = {}
        self._path: Path | None = None

    @classmethod
    def resumed(cls, path: Path) -> Self:
        """Go on with a file, or begin it if there is none.

        Raises DatasetError for a line that is not a result, ConfigError if it cannot be written.
        """
        log = cls()
        log._path = path
        try:
            held = path.read_bytes() if path.exists() else b""
            done = held.rfind(b"\n") + 1
            for number, line in enumerate(held[:done].splitlines(), 1):
                log._read(line, f"{path}, line {number}")
            path.write_bytes(held[:done])
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
        return log

    def get(self, key: Key) -> ResultT | None:
        """Return the result of a key, or None."""
        return self._results.get(_text(key))

    def put(self, key: Key, result: ResultT) -> None:
        """Keep a result."""
        self._results[_text(key)] = result
        if self._path is not None:
            plain = {"key": key, "record": asdict(result)}
            with self._path.open("a", encoding="utf-8") as file:
                file.write(f"{json.dumps(plain, ensure_ascii=False)}\n")

    def __iter__(self) -> Iterator[ResultT]:
        return iter(self._results.values())

    def _read(self, line: bytes, where: str) -> None:
        from pydantic import TypeAdapter, ValidationError  # here, so that a command starts sooner

        try:
            plain = json.loads(line)
            key, record = _text(plain["key"]), plain["record"]
            self._results[key] = TypeAdapter(self.kind).validate_python(record)
            return
        except ValidationError as error:
            why = describe_errors(error.errors(include_input=False))
        except (ValueError, KeyError, TypeError) as error:
            why = str(error)
        raise DatasetError(f"{where} is not a result of this {self.work}: {why}")


def _text(key: Key) -> str:
    return json.dumps(key, sort_keys=True)
