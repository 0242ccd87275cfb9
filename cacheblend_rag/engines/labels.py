"""Records which model a fingerprint belongs to, beside the stored chunk KV."""

from __future__ import annotations

import logging
from pathlib import Path

from pydantic import BaseModel

from cacheblend_rag.engines.base import Engine
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.folders import make_folder, write_private
from cacheblend_rag.settings import LeadInConfig

logger = logging.getLogger(__name__)

FOLDER = "models"
LONGEST = 1 << 12


class Label(BaseModel, frozen=True, extra="forbid"):
    """The engine of a fingerprint. model: its public name, no path. dtype: of its weights."""

    model: str
    dtype: str
    lead_in: LeadInConfig


def put_label(store: Path, engine: Engine, fingerprint: str) -> None:
    """Record the label of an engine's fingerprint; failures are logged and ignored."""
    path = store / FOLDER / f"{fingerprint}.json"
    label = Label(model=engine.model_name, dtype=engine.dtype or "", lead_in=engine.lead_in)
    try:
        if not path.exists():
            make_folder(path.parent)
            write_private(path, label.model_dump_json())
    except OSError as error:
        logger.info("no label was written in %s: %s", path.parent, error)


def labels_in(store: Path) -> dict[str, Label]:
    """Return the labels of a folder of chunk KV, by fingerprint; invalid files are skipped."""
    found = {}
    for path in sorted((store / FOLDER).glob("*.json")):
        try:
            with path.open() as file:
                found[path.stem] = Label.model_validate_json(file.read(LONGEST))
        except (OSError, ValueError, ConfigError):
            logger.info("%s is not a label: skipped", path)
    return found
