"""The selectors by name; a new one is a file here and a line in SELECTORS."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from cacheblend_rag.blend.selectors.all_tokens import AllTokens
from cacheblend_rag.blend.selectors.base import Evidence, Selector
from cacheblend_rag.blend.selectors.chunk_head import ChunkHead
from cacheblend_rag.blend.selectors.fusion import Fusion
from cacheblend_rag.blend.selectors.hkvd import HKVD
from cacheblend_rag.blend.selectors.infoflow import InfoFlow
from cacheblend_rag.blend.selectors.neighbours import Neighbours
from cacheblend_rag.blend.selectors.no_tokens import NoTokens
from cacheblend_rag.blend.selectors.prior import Prior
from cacheblend_rag.blend.selectors.probe import Probe
from cacheblend_rag.blend.selectors.prophet import Prophet
from cacheblend_rag.blend.selectors.question import Question
from cacheblend_rag.blend.selectors.question_mid import QuestionMid
from cacheblend_rag.blend.selectors.question_prior import QuestionPrior
from cacheblend_rag.blend.selectors.random import Random
from cacheblend_rag.blend.selectors.union import Union
from cacheblend_rag.errors import ConfigError

SELECTORS: dict[str, type[Selector]] = {
    "all": AllTokens,
    "none": NoTokens,
    "random": Random,
    "chunk_head": ChunkHead,
    "hkvd": HKVD,
    "prior": Prior,
    "question": Question,
    "question_mid": QuestionMid,
    "question_prior": QuestionPrior,
    "prophet": Prophet,
    "infoflow": InfoFlow,
    "fusion": Fusion,
    "union": Union,
}


SPREAD = ("neighbours", "gap")
"""Options that every selector takes; see Neighbours. A selector's own of that name comes first."""


def make_selector(name: str, options: Mapping[str, Any] | None = None) -> Selector:
    """Return the selector ``name`` with its fields set from ``options``.

    Raises ConfigError when the name or an option is unknown, or a value is out of range.
    """
    if name not in SELECTORS:
        raise ConfigError(f"selector={name!r} must be one of {', '.join(SELECTORS)}")
    kind = SELECTORS[name]
    own = {f.name for f in fields(kind)}
    shared = [option for option in SPREAD if option not in own]
    given = dict(options or {})
    for option in given:
        if option not in own and option not in shared:
            allowed = ", ".join([*sorted(own), *shared])
            raise ConfigError(f"selector_options: {name} has no {option!r}; it takes: {allowed}")
    spread = {option: given.pop(option) for option in shared if option in given}
    selector = kind(**given)
    return Neighbours(selector, **spread) if spread else selector


__all__ = [
    "SELECTORS", "Evidence", "Probe", "Selector", "make_selector",
]  # fmt: skip
