"""Folders of stores, registries, collections and models, for their owner alone."""

from __future__ import annotations

import os
from pathlib import Path
from uuid import uuid4


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


def write_private(path: str | os.PathLike[str], text: str) -> None:
    """Write a file that only its owner may read, replacing an existing one atomically.

    Args:
        path: of the file.
        text: what it is to hold.

    Raises:
        OSError: when it cannot be written.
    """
    begun = Path(f"{os.fspath(path)}.{uuid4().hex}.new")
    try:
        descriptor = os.open(begun, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        begun.replace(path)
    finally:
        begun.unlink(missing_ok=True)
