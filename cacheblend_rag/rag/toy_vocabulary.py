"""Checks whether the toy model can read a text: it only knows the demo's controlled English."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache

from cacheblend_rag.demo.corpus import vocabulary
from cacheblend_rag.models import DEFAULT_MODEL

KNOWN_SHARE = 0.9
WORD = re.compile(r"\w+")


def is_foreign(text: str) -> bool:
    """Whether more than a tenth of a text's words do not occur in the demo's corpus."""
    words = WORD.findall(text.lower())
    known = sum(word in _known_words() for word in words)
    return known < KNOWN_SHARE * len(words)


def foreign_warning(name: str, options: str) -> str:
    """Return a warning that the toy model cannot read the file ``name``."""
    return (
        f"the toy model 'demo' reads the demo's notes only, not texts like {name}: its answers "
        f"will be gibberish. Give {options}{DEFAULT_MODEL}, a folder or a hub name"
    )


def first_foreign(documents: Iterable[tuple[str, Iterable[str]]]) -> str | None:
    """Return the name of the first document, given as name and texts, that holds a foreign text."""
    return next((name for name, texts in documents if any(map(is_foreign, texts))), None)


@cache
def _known_words() -> frozenset[str]:
    return frozenset(word.lower() for word in vocabulary())
