"""Settings of requests, lead-ins, stores and engines, validated when they are created.

Pydantic models are imported on first use: importing the package builds no model.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from cacheblend_rag.settings.options import (
    AUTO,
    DEFAULT_RATIO,
    EMBEDDED,
    ENGINES,
    PROFILES,
    VLLM,
    LeadInKind,
    Precision,
    check_namespace,
    names_of,
)

if TYPE_CHECKING:
    from cacheblend_rag.settings.base import Settings
    from cacheblend_rag.settings.engine import EngineConfig, GuardConfig
    from cacheblend_rag.settings.profile import LeadInConfig, Profile
    from cacheblend_rag.settings.request import BlendConfig
    from cacheblend_rag.settings.store import StoreConfig

__all__ = [
    "AUTO",
    "DEFAULT_RATIO",
    "EMBEDDED",
    "ENGINES",
    "PROFILES",
    "VLLM",
    "BlendConfig",
    "EngineConfig",
    "GuardConfig",
    "LeadInConfig",
    "LeadInKind",
    "Precision",
    "Profile",
    "Settings",
    "StoreConfig",
    "check_namespace",
    "names_of",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("cacheblend_rag.settings.engine"), name)  # it uses all others
