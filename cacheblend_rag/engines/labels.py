"""Records which model a fingerprint belongs to, beside the stored chunk KV."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from cacheblend_rag.engines.base import Engine
from cacheblend_rag.errors import ConfigError
from cacheblend_rag.folders import make_folder
from cacheblend_rag.settings import LeadInConfig

logger = logging.getLogger(__name__)

FOLDER = "models"
LONGEST = 1 << 12


@dataclass(frozen=True)
class Label:
    """The engine of a fingerprint. model: its public name, no path. dtype: of its weights."""

    model: str
    dtype: str
    lead_in: LeadInConfig


def put_label(store: Path, engine: Engine, fingerprint: str) -> None:
    """Record the label of an engine's fingerprint; failures are logged and ignored."""
    path = store / FOLDER / f"{fingerprint}.json"
    label = Label(engine.model_name, engine.dtype or "", engine.lead_in)
    begun = path.with_name(f"{path.name}.{uuid4().hex}.tmp")
    try:
        if path.exists():
            return
        make_folder(path.parent)
        with os.fdopen(os.open(begun, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump({**vars(label), "lead_in": label.lead_in.to_dict()}, file)
        begun.replace(path)
    except OSError as error:
        logger.info("no label was written in %s: %s", path.parent, error)


def labels_in(store: Path) -> dict[str, Label]:
    """Return the labels of a folder of chunk KV, by fingerprint; invalid files are skipped."""
    found = {}
    for path in sorted((store / FOLDER).glob("*.json")):
        try:
            with path.open() as file:
                found[path.stem] = _label(json.loads(file.read(LONGEST)))
        except (OSError, ValueError, ConfigError):
            logger.info("%s is not a label: skipped", path)
    return found


def _label(told: Any) -> Label:
    """Read a label; raises ValueError or ConfigError if it is invalid."""
    if not isinstance(told, Mapping) or set(told) != {"model", "dtype", "lead_in"}:
        raise ValueError("no label")
    if not (isinstance(told["model"], str) and isinstance(told["dtype"], str)):
        raise ValueError("no label")
    return Label(told["model"], told["dtype"], LeadInConfig.of(told["lead_in"]))
