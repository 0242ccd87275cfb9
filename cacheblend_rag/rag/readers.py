"""Finds files, and reads their text."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from cacheblend_rag.errors import CacheBlendError, MissingExtraError
from cacheblend_rag.rag import extracting
from cacheblend_rag.rag.extracting import Extracted

EXTRA = "rag"
FILE_SECONDS = 60.0


class UnreadableFileError(CacheBlendError):
    """A file holds no text that can be read; the message says why, without the file's name."""


@dataclass(frozen=True)
class FoundFiles:
    """The files found below paths.

    files: those that can be read, in order. unknown: how many have another extension. unopened:
    with the reason, folders that could not be listed, links that are not followed, and pipes,
    sockets and devices.
    """

    files: tuple[Path, ...]
    unknown: int
    unopened: tuple[tuple[Path, str], ...]


def find_files(paths: Iterable[Path], leave_out: Path) -> FoundFiles:
    """Return the files among ``paths`` and in folders among them, each once.

    Hidden files and folders (names that begin with a dot), lock files of office programs (with
    ``~$``) and the folder ``leave_out`` are skipped. Links to folders, and links to files outside,
    are not followed.
    """
    files: dict[Path, None] = {}
    unknown: set[Path] = set()
    unopened: list[tuple[Path, str]] = []

    def refused(error: OSError) -> None:
        unopened.append((Path(error.filename), error.strerror or str(error)))

    for path in paths:
        walked = path.resolve() if os.path.isdir(path) else None  # False where it may not look
        found: Iterable[Path] = [path.parent.resolve() / path.name]
        for file in _walk(walked, leave_out.resolve(), refused) if walked else found:
            if not os.path.isfile(file):
                if reason := _no_file(file):
                    unopened.append((file, reason))
            elif walked and not file.resolve().is_relative_to(walked):
                unopened.append((file, "is a link that leads out of the folder"))
            elif file.suffix.lower() in extracting.EXTRACTORS:
                files[file] = None
            else:
                unknown.add(file)
    return FoundFiles(tuple(files), len(unknown), tuple(unopened))


def read_file(path: Path, seconds: float = FILE_SECONDS) -> Extracted:
    """Return a file's text; PDF and HTML are parsed in a process that hostile files may crash.

    Raises UnreadableFileError when the file cannot be read, holds no text, is too large or takes
    longer than ``seconds``, MissingExtraError without the extra ``rag``.
    """
    answer = extracting.answer(path) if extracting.is_plain(path) else _parsed(path, seconds)
    if "missing" in answer:
        raise MissingExtraError("reading documents", EXTRA)
    if "text" not in answer:
        raise UnreadableFileError(answer["problem"])
    return Extracted(**answer)


def _parsed(path: Path, seconds: float) -> dict[str, str]:
    # -P: no module is imported from the current folder.
    command = [sys.executable, "-P", "-m", extracting.__name__, os.path.abspath(path)]
    try:
        done = subprocess.run(  # noqa: S603
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=seconds, check=True
        )
    except subprocess.TimeoutExpired:
        raise UnreadableFileError(f"takes longer than {seconds:g} s to read") from None
    except subprocess.CalledProcessError:
        raise UnreadableFileError("ends the process that reads it") from None
    answer: dict[str, str] = json.loads(done.stdout)
    return answer


def _no_file(path: Path) -> str | None:
    """Return what a path is if it is no file; None if it does not exist or is unreadable."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        if not path.is_symlink():
            return None if isinstance(error, FileNotFoundError) else error.strerror
        return f"is a broken link ({error.strerror})"
    kinds = ((stat.S_ISFIFO, "pipe"), (stat.S_ISSOCK, "socket"), (stat.S_ISDIR, "folder"))
    kind = next((name for holds, name in kinds if holds(mode)), "device")
    return f"is a {kind}, not a file"


def _walk(folder: Path, leave_out: Path, refused: Callable[[OSError], None]) -> Iterator[Path]:
    for base, folders, names in os.walk(folder, onerror=refused):
        folders[:] = sorted(
            name for name in folders if name[0] != "." and Path(base, name) != leave_out
        )
        yield from (Path(base, name) for name in sorted(names) if not name.startswith((".", "~$")))
        empty = not (names or folders) and base != str(folder)
        if empty and os.path.splitext(base)[1].lower() in extracting.EXTRACTORS:
            yield Path(base)  # told as what it is: a folder that is called like a file
