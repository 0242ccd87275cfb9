"""Reads files of questions, whose form is recognised by their content."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cacheblend_rag.errors import DatasetError
from cacheblend_rag.quality.data.fields import Field
from cacheblend_rag.quality.data.forms import FORMS
from cacheblend_rag.quality.dataset import EvalDataset


def load_dataset(path: Path) -> EvalDataset:
    """Read a file in any of the forms, as JSON or as JSON lines.

    Raises DatasetError, naming file and field, when it cannot be read, has no known form or is
    malformed.
    """
    field = Field(_parse(path), str(path))
    for form in FORMS:
        if form.recognise(field.value):
            return form.read(field, path.stem)
    raise _unrecognised(field)


def _parse(path: Path) -> Any:
    """Return a file's JSON value; JSON lines, of which there may be only one, make a list."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DatasetError(f"{path}: cannot be read as JSON ({error})") from error
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg != "Extra data":
            raise DatasetError(f"{path}: cannot be read as JSON ({error})") from error
        return [_parse_line(path, i, line) for i, line in enumerate(text.split("\n")) if line]
    return [value] if isinstance(value, dict) and "question" in value else value


def _parse_line(path: Path, index: int, line: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise DatasetError(f"{path}: line {index + 1} cannot be read as JSON ({error})") from error


def _unrecognised(field: Field) -> DatasetError:
    if isinstance(field.value, list):
        first = field.items()[0]
        if not isinstance(first.value, dict):
            return first.fail("an object")
    elif not isinstance(field.value, dict):
        return field.fail("an object or a list of questions")
    known = ", ".join(form.title for form in FORMS)
    return DatasetError(f"{field.where}: the form is not recognised; it must be one of: {known}")
