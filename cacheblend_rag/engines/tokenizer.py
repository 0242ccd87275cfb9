"""Loading a model's tokenizer from a hub name or a local folder, with one-line errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cacheblend_rag.engines.naming import check_source, is_folder, source_of
from cacheblend_rag.errors import ModelLoadError


def load_tokenizer(name: str | Path) -> Any:
    """Return a model's tokenizer, without its weights.

    Args:
        name: a hub name, a local folder or ``demo``.

    Raises:
        ModelLoadError: when there is none, or it cannot be loaded.
    """
    from transformers import AutoTokenizer

    check_source(name)
    try:
        return AutoTokenizer.from_pretrained(source_of(name))
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelLoadError(f"{unloaded('tokenizer of', name)}: {first_line(error)}") from error


def unloaded(what: str, name: str | Path) -> str:
    """Say that something could not be loaded; of a hub name, that it is no folder here."""
    where = "" if is_folder(source_of(name)) else " from a hub, and no folder here is called so"
    return f"{what} {str(name)!r} could not be loaded{where}"


def first_line(error: BaseException) -> str:
    """Return an error's first line, or its kind."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
