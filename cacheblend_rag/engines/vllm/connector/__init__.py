"""The KV connector that runs inside vLLM; all uses of vLLM's internals are in this folder.

Servers get this module's path and the connector's name. The connector is imported on first
use, so that its settings can be read without vLLM.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cacheblend_rag.engines.vllm.connector.connector import CacheBlendConnector

__all__ = ["CacheBlendConnector"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.connector"), name)
