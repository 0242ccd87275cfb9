"""The folder of converted models, to which each model is written once.

A conversion is written under a temporary name, under a lock, and renamed when it is complete, so
that concurrent processes convert a model once and never see an incomplete one.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from filelock import FileLock

from cacheblend_rag.errors import ModelLoadError, first_line
from cacheblend_rag.folders import make_folder

VARIABLE = "CACHEBLEND_MODELS"
RECORD = "cacheblend.json"
FORMAT = 1
"""The version of the conversion; folders of another version are not used."""


@dataclass(frozen=True)
class Record:
    """The record in a converted model's folder.

    name: of the model in reports. source: the package or file that it was made from.
    """

    name: str
    source: str
    format: int = FORMAT


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
        record = Record(plain["name"], plain["source"], plain["format"])
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return record if record.format == FORMAT else None


def converted_models() -> Iterator[tuple[Path, Record]]:
    """Yield the folder and the record of every converted model, by name of folder."""
    folder = models_folder()
    if not folder.is_dir():
        return
    for path in sorted(folder.iterdir()):
        if not path.name.startswith(".") and (record := read_record(path)) is not None:
            yield path, record


def make_once(folder: Path, record: Record, write: Callable[[Path], None]) -> Path:
    """Return ``folder``, after ``write`` has filled it the first time.

    write: gets an empty folder; its errors propagate, and the folder is then removed.
    Raises ModelLoadError when the folder of converted models cannot be used.
    """
    if folder.is_dir():
        return folder
    with _locked(folder):
        if not folder.is_dir():
            partial = folder.with_name(f".{folder.name}.partial")
            shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
            try:
                with _usable(folder):
                    make_folder(partial)
                write(partial)
                with _usable(folder):
                    told = json.dumps(asdict(record), indent=1)
                    (partial / RECORD).write_text(f"{told}\n", encoding="utf-8")
                    _flush(partial)
                    partial.rename(folder)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    return folder


def size_of(folder: Path) -> int:
    """Return the total size of a folder's files."""
    return sum(file.stat().st_size for file in folder.iterdir() if file.is_file())


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a converted model against changes by other processes."""
    lock = FileLock(folder.with_name(f".{folder.name}.lock"), mode=0o600)
    with _usable(folder):
        make_folder(folder.parent)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _usable(folder: Path) -> Iterator[None]:
    """Turn an OSError into a ModelLoadError that names the folder of converted models."""
    try:
        yield
    except OSError as error:
        raise ModelLoadError(
            f"the folder of converted models {folder.parent} cannot be used: {first_line(error)}; "
            f"set {VARIABLE} to another folder"
        ) from error


def _flush(folder: Path) -> None:
    """Sync a folder's files to disk, so that a renamed folder is complete after a power cut."""
    for file in folder.iterdir():
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
