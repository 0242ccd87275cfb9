"""Reads a model's generation_config.json; a wrong value is ignored with a warning."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from cacheblend_rag.errors import ModelLoadError, first_line
from cacheblend_rag.models import resolve

logger = logging.getLogger(__name__)

FILE_NAME = "generation_config.json"
REFUSED = (AttributeError, TypeError, ValueError)
"""Errors that transformers raises for a value that it refuses."""


def generation_values(name: str | Path) -> dict[str, Any]:
    """Return the fields in a model's generation_config.json; empty if there is no such file.

    For a hub's model only a local copy is read. A file that is no JSON object is ignored with a
    log line.

    Args:
        name: as for ``models.resolve``.
    """
    return _read(name, local_files_only=True) or {}


def repaired_generation_config(name: str | Path) -> Any:
    """Return a GenerationConfig without the values that transformers refuses.

    None if it refuses none: it then reads the file itself. Values left out are logged. The file
    may be fetched from a hub, like the model.
    """
    from transformers import AutoConfig, GenerationConfig

    values = _read(name, local_files_only=False)
    if values is None:
        return GenerationConfig.from_model_config(AutoConfig.from_pretrained(resolve(name)))
    try:
        GenerationConfig(**values)
    except REFUSED as error:
        reason = first_line(error)
    else:
        return None
    kept: dict[str, Any] = {}
    for field, value in values.items():
        try:
            GenerationConfig(**kept, **{field: value})
        except REFUSED:
            continue
        kept[field] = value
    refused = ", ".join(field for field in values if field not in kept)
    logger.warning("ignored in the model's generation_config: %s (%s)", refused, reason)
    return GenerationConfig(**kept)


def _read(name: str | Path, *, local_files_only: bool) -> dict[str, Any] | None:
    """Return the fields in the file, none where there is no file; None where it is no object."""
    from transformers.utils import cached_file

    try:
        path = cached_file(resolve(name), FILE_NAME, local_files_only=local_files_only)
        content = Path(path).read_bytes()
    except (OSError, ModelLoadError):
        return {}
    reason = "it holds no JSON object"
    try:
        values = json.loads(content.decode("utf-8"))
    except ValueError as error:
        values, reason = None, first_line(error)
    if isinstance(values, dict):
        return values
    logger.warning("the model's %s is ignored: %s", FILE_NAME, reason)
    return None
