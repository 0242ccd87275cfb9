"""The selectors by name; a new one is a file here and a line in SELECTORS."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cacheblend_rag.blend.selectors.base import Evidence, Selector
from cacheblend_rag.blend.selectors.chunk_head import ChunkHead
from cacheblend_rag.blend.selectors.controls import AllTokens, NoTokens, Random
from cacheblend_rag.blend.selectors.hkvd import HKVD
from cacheblend_rag.blend.selectors.prior import Prior
from cacheblend_rag.blend.selectors.question import Question
from cacheblend_rag.errors import ConfigError

__all__ = ["SELECTORS", "Evidence", "Question", "Selector", "make_selector"]

SELECTORS: dict[str, type[Selector]] = {
    "all": AllTokens,
    "none": NoTokens,
    "random": Random,
    "chunk_head": ChunkHead,
    "hkvd": HKVD,
    "prior": Prior,
    "question_mid": Question,
}


def make_selector(name: str, options: Mapping[str, Any] | None = None) -> Selector:
    """Return the selector ``name`` with its fields set from ``options``.

    Raises ConfigError when the name or an option is unknown, or a value is out of range.
    """
    if name not in SELECTORS:
        raise ConfigError(f"selector={name!r} must be one of {', '.join(SELECTORS)}")
    kind, options = SELECTORS[name], options or {}
    for option in options:
        if option not in kind.model_fields:
            takes = ", ".join(sorted(kind.model_fields))
            allowed = f"it takes: {takes}" if takes else "it takes none"
            raise ConfigError(f"selector_options: {name} has no {option!r}; {allowed}")
    return kind(**options)
