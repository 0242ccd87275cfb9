"""Folders of stores, registries, collections and models, for their owner alone."""

from __future__ import annotations

import os
from pathlib import Path


def make_folder(path: str | os.PathLike[str]) -> None:
    """Create a folder, and those above it that are missing, with permissions for the owner only.

    Folders that exist keep theirs.

    Raises:
        OSError: when one cannot be created, or is no folder.
    """
    folder = Path(path)
    if not folder.exists():
        make_folder(folder.parent)
    folder.mkdir(mode=0o700, exist_ok=True)
