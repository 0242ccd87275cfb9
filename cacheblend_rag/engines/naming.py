"""How models are named: by users, in public, and to the libraries that load them."""

from __future__ import annotations

import os
import re
from pathlib import Path

from cacheblend_rag.errors import ModelLoadError

DEMO_MODEL = "demo"
DEMO_FOLDER = Path(__file__).parents[1] / "demo" / "model"
"""The bundled model, a folder in hub format."""
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)


def source_of(name: str | Path) -> str:
    """Return what libraries load a model by, a folder or a hub name; ``demo`` is bundled."""
    return str(DEMO_FOLDER) if str(name) == DEMO_MODEL else os.path.expanduser(name)


def public_name(name: str) -> str:
    """Return a hub name as it is, and of a local folder only its own name."""
    path = Path(source_of(name))
    if path == DEMO_FOLDER:
        return DEMO_MODEL
    return (path.resolve().name or name) if is_folder(name) else name


def is_folder(name: str | Path) -> bool:
    """Whether a name is a folder's: one is here, or no hub name looks like it."""
    return Path(name).exists() or not HUB_NAME.fullmatch(str(name))


def check_source(name: str | Path) -> None:
    """Raise ModelLoadError when a name is a folder's, and the folder holds no model."""
    folder = Path(source_of(name))
    if "://" in str(name):  # a storage that vLLM reads
        return
    if is_folder(source_of(name)) and not folder.is_dir():
        raise ModelLoadError(f"model={str(name)!r}: there is no such folder")
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ModelLoadError(
            f"model={str(name)!r}: the folder holds no config.json; give a model in hub format"
        )
