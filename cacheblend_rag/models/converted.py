"""The folder of converted models, to which each model is written once.

A conversion is written under a temporary name, under a lock, and renamed when it is complete, so
that concurrent processes convert a model once and never see an incomplete one.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from filelock import FileLock

from cacheblend_rag.errors import ModelLoadError, first_line
from cacheblend_rag.folders import make_folder

VARIABLE = "CACHEBLEND_MODELS"
RECORD = "cacheblend.json"
FORMAT = 1
"""The version of the conversion, at the end of a folder's name."""


class Record(NamedTuple):
    """The record in a converted model's folder.

    name: of the model in reports. source: the package or file that it was made from.
    """

    name: str
    source: str


def models_folder() -> Path:
    """Return the folder of converted models.

    It is CACHEBLEND_MODELS if that is set, else ``cacheblend-rag/models`` in the user's cache
    directory (XDG_CACHE_HOME, ``~/.cache`` by default).
    """
    if named := os.environ.get(VARIABLE):
        return Path(named).expanduser().absolute()
    base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    root = base if base.is_absolute() else Path.home() / ".cache"
    return root / "cacheblend-rag" / "models"


def read_record(folder: Path) -> Record | None:
    """Return a converted model's record; None when the folder is not one."""
    try:
        plain = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        return Record(plain["name"], plain["source"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def make_once(folder: Path, record: Record, write: Callable[[Path], None]) -> Path:
    """Return ``folder``, after ``write`` has filled it the first time.

    write: gets an empty folder. What it raises removes the folder, and is raised; an OSError, such
    as of a full disk, as a ModelLoadError that names the folder of converted models.
    """
    if folder.is_dir():
        return folder
    partial = folder.with_name(f".{folder.name}.partial")
    try:
        make_folder(folder.parent)
        with FileLock(folder.with_name(f".{folder.name}.lock"), mode=0o600):
            if not folder.is_dir():
                _write(partial, record, write)
                partial.rename(folder)
    except OSError as error:
        raise ModelLoadError(
            f"the folder of converted models {folder.parent} cannot be used: {first_line(error)}: "
            f"free space or set {VARIABLE} to another folder"
        ) from error
    return folder


def _write(folder: Path, record: Record, write: Callable[[Path], None]) -> None:
    """Fill a folder, and have its files on the disk, so that they are whole after a power cut."""
    shutil.rmtree(folder, ignore_errors=True)  # of a process that was killed
    make_folder(folder)
    try:
        write(folder)
        (folder / RECORD).write_text(f"{json.dumps(record._asdict())}\n", encoding="utf-8")
        for file in folder.iterdir():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
