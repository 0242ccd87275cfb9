"""Opens the engine of a collection, with the collection's settings and its own KV store."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from cacheblend_rag.engines.factory import open_engine
from cacheblend_rag.engines.model_files import load_tokenizer, quiet_libraries
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.models import absolute
from cacheblend_rag.rag.collection import KV_NAME, CollectionSettings
from cacheblend_rag.rag.prompt import RagPrompt
from cacheblend_rag.rag.retrieval import BUNDLED

if TYPE_CHECKING:
    from cacheblend_rag.engines.base import Engine
    from cacheblend_rag.settings import StoreConfig


def _store() -> StoreConfig:
    from cacheblend_rag.settings import StoreConfig

    return StoreConfig()


@dataclass(frozen=True)
class Placement:
    """Settings of a collection's engine that each run chooses; they are not stored.

    device: None is the best one. store: how chunk KV is kept, without its folder.
    fill_on_miss: see EngineConfig; useless for a process that asks once and ends. profile: see
    EngineConfig; its name, or a file.
    """

    device: str | None = None
    store: StoreConfig = field(default_factory=_store)
    fill_on_miss: bool = False
    profile: str | None = None


def resolved_name(name: str) -> str:
    """Return a model's name, made absolute if local, so that it works from any folder."""
    return name if name == BUNDLED else absolute(name)


def with_lead_in(settings: CollectionSettings) -> CollectionSettings:
    """Return a new collection's settings with the lead-in that the tokenizer determines.

    Raises ModelLoadError when there is no such model.
    """
    quiet_libraries()
    prompt = RagPrompt(load_tokenizer(settings.model), settings.instruction)
    return replace(settings, lead_in=prompt.lead_in)


def open_new(
    folder: Path, settings: CollectionSettings, placement: Placement
) -> tuple[CollectionSettings, Engine]:
    """Open the engine of a new collection; returns the complete settings, too."""
    engine = _open(folder, settings, placement)
    dtype = engine.dtype or settings.dtype
    return replace(settings, dtype=dtype, fingerprint=engine.fingerprint), engine


def open_known(folder: Path, settings: CollectionSettings, placement: Placement) -> Engine:
    """Open the engine of a collection.

    Raises ConfigError when the model is no longer the one that the collection was indexed with, or
    an engine of another kind.
    """
    quiet_libraries()
    engine = _open(folder, settings, placement)
    if engine.fingerprint != settings.fingerprint:
        engine.close()
        raise ConfigError(
            f"model {settings.model!r} is not the one that {folder} was indexed with (its weights "
            "or its tokenizer changed, or the engine or the store's precision is another): index "
            "with --rebuild, or give what it was indexed with"
        )
    return engine


def _open(folder: Path, settings: CollectionSettings, placement: Placement) -> Engine:
    from cacheblend_rag.settings import EngineConfig, Profile

    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    config = EngineConfig(
        engine=settings.engine,
        model=settings.model,
        instruction=settings.lead_in,
        namespace=settings.namespace,
        store=placement.store.with_changes(kv_path=folder / KV_NAME),
        fill_on_miss=placement.fill_on_miss,
        profile=Profile.chosen(placement.profile),
        device=placement.device,
        dtype=settings.dtype or None,
    )
    return open_engine(config)
