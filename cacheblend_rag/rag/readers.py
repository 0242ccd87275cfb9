"""Finds files, reads their text, and splits it by tokens."""

from __future__ import annotations

import json
import os
import select
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from cacheblend_rag.errors import CacheBlendError, MissingExtraError
from cacheblend_rag.rag import extracting
from cacheblend_rag.rag.extracting import PARAGRAPH, Extracted

EXTRA = "rag"
FILE_SECONDS = 60.0
CRASHED = "ends the process that reads it"


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
        if walked:
            found: Iterable[Path] = _walk(walked, leave_out.resolve(), refused)
        else:
            found = [path.parent.resolve() / path.name]
        for file in found:
            if not os.path.isfile(file):
                if reason := _no_file(file):
                    unopened.append((file, reason))
                continue
            if walked and not file.resolve().is_relative_to(walked):
                unopened.append((file, "is a link that leads out of the folder"))
                continue
            if file.suffix.lower() in extracting.EXTRACTORS:
                files[file] = None
            else:
                unknown.add(file)
    return FoundFiles(tuple(files), len(unknown), tuple(unopened))


class FileReader(AbstractContextManager["FileReader"]):
    """Reads files' text in a separate process, which hostile files may crash.

    seconds: limit per file.
    """

    def __init__(self, seconds: float = FILE_SECONDS) -> None:
        self._seconds = seconds
        self._process: subprocess.Popen[bytes] | None = None

    def read(self, path: Path) -> Extracted:
        """Return a file's text.

        Raises UnreadableFileError when the file cannot be read, holds no text, is too large or
        takes too long, MissingExtraError without the extra ``rag``.
        """
        try:
            answer = self._ask(path)
        except BaseException:
            self.close()
            raise
        if "missing" in answer:
            raise MissingExtraError("reading documents", EXTRA)
        if "text" not in answer:
            raise UnreadableFileError(answer["problem"])
        return Extracted(**answer)

    def close(self) -> None:
        """Kill the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, path: Path) -> dict[str, str]:
        process = self._process = self._process or subprocess.Popen(  # noqa: S603
            # -P: no module is imported from the current folder.
            [sys.executable, "-P", "-m", extracting.__name__],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        questions, answers = cast("IO[bytes]", process.stdin), cast("IO[bytes]", process.stdout)
        deadline = time.monotonic() + self._seconds
        try:
            questions.write(json.dumps(str(path)).encode() + b"\n")
        except BrokenPipeError:
            raise UnreadableFileError(CRASHED) from None
        said = bytearray()
        while not said.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([answers], [], [], left)[0]:
                raise UnreadableFileError(f"takes longer than {self._seconds:g} s to read")
            part = os.read(answers.fileno(), 1 << 20)
            if not part:
                raise UnreadableFileError(CRASHED)
            said += part
        answer: dict[str, str] = json.loads(said)
        return answer


def make_splitter(
    tokenize: Callable[[str], Sequence[int]], chunk_size: int, chunk_overlap: int
) -> Callable[[str], list[str]]:
    """Return a function that splits text at paragraphs, sentences and, last, words.

    chunk_size, chunk_overlap: in tokens of ``tokenize``. Raises MissingExtraError.
    """
    try:
        from llama_index.core.node_parser import SentenceSplitter
    except ImportError as error:
        raise MissingExtraError("splitting documents", EXTRA) from error
    splitter: Any = SentenceSplitter(
        chunk_size=chunk_size,
        chunk_overlap=chunk_overlap,
        tokenizer=tokenize,
        paragraph_separator=PARAGRAPH,
    )

    split: Callable[[str], list[str]] = splitter.split_text
    return split


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
