"""Loads a model's tokenizer from a hub name or a local folder, with one-line errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cacheblend_rag.errors import ModelLoadError, first_line
from cacheblend_rag.models import is_local, tokenizer_source


def load_tokenizer(name: str | Path) -> Any:
    """Return a model's tokenizer, without its weights.

    Args:
        name: a hub name, a folder with a model or only a tokenizer, a GGUF file, ``smollm2``.

    Raises:
        ModelLoadError: when there is none, or it cannot be loaded.
    """
    from transformers import AutoTokenizer

    source = tokenizer_source(name)
    try:
        return AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise ModelLoadError(f"{unloaded('tokenizer of', name)}: {first_line(error)}") from error


def unloaded(what: str, name: str | Path) -> str:
    """Return a message that something could not be loaded; a hub name is no local folder."""
    where = "" if is_local(name) else " from a hub, and no folder here is called so"
    return f"{what} {str(name)!r} could not be loaded{where}"
