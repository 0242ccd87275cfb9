"""Opens an engine, and shows the progress of that."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cacheblend_rag.engines.factory import open_engine
from cacheblend_rag.engines.quiet_import import quiet_libraries
from cacheblend_rag.rag.progress import ProgressCallbacks

if TYPE_CHECKING:
    from cacheblend_rag.engines.base import Engine
    from cacheblend_rag.settings import EngineConfig


def load_engine(config: EngineConfig, progress: ProgressCallbacks) -> Engine:
    """Open the engine of a config; raises what ``open_engine`` raises."""
    with progress.phase("loading the libraries"):
        quiet_libraries()
    with progress.phase(f"loading the model {config.model}".rstrip()):
        return open_engine(config)
