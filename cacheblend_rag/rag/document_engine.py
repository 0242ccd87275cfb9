"""Reads a file to analyze, and opens an engine with the instruction of the analysis' prompts."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from cacheblend_rag.errors import PromptError, StoreError
from cacheblend_rag.models import DEFAULT_MODEL
from cacheblend_rag.rag import checks
from cacheblend_rag.rag.extracting import EXTRACTORS, Extracted
from cacheblend_rag.rag.loading import load_engine
from cacheblend_rag.rag.progress import ProgressCallbacks
from cacheblend_rag.rag.readers import FileReader, UnreadableFileError
from cacheblend_rag.rag.window_prompts import INSTRUCTION, default_lead_in
from cacheblend_rag.settings import EMBEDDED

if TYPE_CHECKING:
    from cacheblend_rag.engines.base import Engine
    from cacheblend_rag.settings import BlendConfig, StoreConfig

DEFAULT_KV_PATH = Path(".cacheblend-documents")


def check_document(path: Path) -> None:
    """Check a document's path.

    Raises StoreError if nothing is there, PromptError if it is no file of a supported type.
    """
    if not path.exists():
        raise StoreError(f"{path} does not exist: give the path of a document")
    if not path.is_file():
        raise PromptError(f"{path} is not a file: give one document")
    if path.suffix.lower() not in EXTRACTORS:
        raise PromptError(f"{path} must be one of {' '.join(EXTRACTORS)}, by its name")


def read_document(path: Path) -> Extracted:
    """Return a file's text; raises PromptError when it has none, MissingExtraError."""
    try:
        with FileReader() as reader:
            return reader.read(path)
    except UnreadableFileError as error:
        raise PromptError(f"{path} cannot be analyzed: {error}") from error


@dataclass(frozen=True)
class AnalysisEngine:
    """The settings of an engine for analyses, checked before anything is loaded.

    store: where KV is kept, its folder included. ratio, selector: override how KV is blended.
    The others are as in EngineConfig.
    Raises ConfigError, ModelLoadError or MissingExtraError.
    """

    store: StoreConfig
    model: str = DEFAULT_MODEL
    engine: str = EMBEDDED
    device: str | None = None
    dtype: str | None = None
    profile: str | None = None
    ratio: float | None = None
    selector: str | None = None

    def __post_init__(self) -> None:
        checks.check_blend(self.ratio, self.selector)
        checks.check_engine(self.engine)
        checks.check_model(self.model)
        checks.check_placement(self.device, self.dtype)

    def open(self, progress: ProgressCallbacks) -> Engine:
        """Open the engine."""
        from cacheblend_rag.settings import EngineConfig, Profile

        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        config = EngineConfig(
            engine=self.engine,
            model=self.model,
            instruction=partial(default_lead_in, instruction=INSTRUCTION),
            store=self.store,
            profile=Profile.chosen(self.profile),
            device=self.device,
            dtype=self.dtype,
        )
        return load_engine(config, progress)

    def config(self, engine: Engine) -> BlendConfig:
        """Return the settings of the opened engine's requests."""
        return engine.config.with_given(recompute_ratio=self.ratio, selector=self.selector)
