"""Deletions that a tier could not carry out: their chunks are not read, and deleted later."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

from filelock import FileLock

from cacheblend_rag.errors import StoreError
from cacheblend_rag.folders import make_folder
from cacheblend_rag.kv.chunk_kv import KVKey
from cacheblend_rag.kv.tiers.files import read_regular, replace, write_parts

logger = logging.getLogger(__name__)

MOST_DELETIONS = 100_000
MOST_BYTES = MOST_DELETIONS * 512
LOCK_SECONDS = 10.0

Deletion = tuple[str, KVKey]
"""A tier's name, and the key of the chunk to delete there."""


class Deletions:
    """Deletions that wait for their tiers, with their times; safe to share between threads.

    They are noted in the file ``deletions``, a line each, which all processes share that keep their
    store or registry in the folder. Without a folder, or where it cannot be written to, they are
    kept in this process' memory. Lines that are no deletions are skipped.
    """

    def __init__(self, folder: Path | None) -> None:
        self._path = None if folder is None else folder / "deletions"
        self._mutex = Lock()
        self._written: dict[Deletion, float] = {}
        self._unwritten: dict[Deletion, float] = {}
        self._seen: tuple[int, int, int] | None = None
        self._warned = ""
        self.refresh()

    def __len__(self) -> int:
        """Return how many deletions wait."""
        return len(self._written) + len(self._unwritten)

    def hides(self, tier: str, key: KVKey, written_at: float) -> bool:
        """Whether a tier's copy of a chunk, by the time it was first stored, is to be deleted."""
        one = tier, key
        return any(written_at <= noted.get(one, 0) for noted in (self._written, self._unwritten))

    def of(self, tier: str) -> list[tuple[KVKey, float]]:
        """Return a tier's deletions, each with its time."""
        with self._mutex:
            noted = {**self._written, **self._unwritten}
        return [(key, at) for (name, key), at in noted.items() if name == tier]

    def add(self, tiers: Sequence[str], key: KVKey, at: float) -> bool:
        """Note that tiers must delete a chunk's copies from before a time.

        Returns:
            Whether this is noted on disk, where it outlives the process.

        Raises:
            StoreError: when too many deletions wait.
        """
        new = {(tier, key): at for tier in tiers}
        if len(self) + len(new) > MOST_DELETIONS:
            raise StoreError(
                f"{len(self)} deletions wait for tiers that do not answer ({', '.join(tiers)}): "
                "delete this again once they do"
            )
        with self._mutex:
            try:
                with self._exclusive() as path:
                    self._read(path)
                    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK
                    with open(os.open(path, flags, 0o600), "wb", buffering=0) as file:
                        write_parts(file, [_text(new)])
                    self._written.update(new)
                    self._seen = _state(path)
            except OSError as error:
                logger.warning("deletions are kept until this process ends: %s", error)
                self._unwritten.update(new)
                return False
        return True

    def remove(self, tier: str, done: Iterable[tuple[KVKey, float]]) -> None:
        """Remove deletions of a tier that are carried out, unless they were noted again."""
        over = {((tier, key), at) for key, at in done}
        with self._mutex:
            self._unwritten = dict(self._unwritten.items() - over)
            if not over & self._written.items():
                return
            try:
                with self._exclusive() as path:
                    self._read(path)
                    self._written = dict(self._written.items() - over)
                    self._replace(path)
            except OSError as error:  # they are carried out once more, which finds nothing
                logger.debug("carried out deletions stay noted: %s", error)

    def refresh(self) -> None:
        """Read what other processes have noted, or carried out, since the last call."""
        if self._path is not None:
            with self._mutex:
                try:
                    self._read(self._path)
                except OSError as error:
                    if str(error) != self._warned:  # it is read every second
                        logger.warning("deletions cannot be read: %s", error)
                    self._warned = str(error)

    @contextmanager
    def _exclusive(self) -> Iterator[Path]:
        """Lock the file against other processes; raises OSError, also where there is none."""
        if self._path is None:
            raise FileNotFoundError("this store has no folder")
        make_folder(self._path.parent)
        with FileLock(f"{self._path}.lock", timeout=LOCK_SECONDS, mode=0o600):
            yield self._path

    def _read(self, path: Path) -> None:
        state = _state(path)
        if state != self._seen:
            text = b"" if state is None else read_regular(path, MOST_BYTES)
            lines = text.decode("ascii", "replace").splitlines()[:MOST_DELETIONS]
            self._written = dict(one for line in lines if (one := _parsed(line)) is not None)
            self._seen = state

    def _replace(self, path: Path) -> None:
        if not self._written:
            path.unlink(missing_ok=True)
        else:
            replace(path, _text(self._written))
        self._seen = _state(path)


def _state(path: Path) -> tuple[int, int, int] | None:
    """Return what changes with a file, None if there is none."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _text(noted: Mapping[Deletion, float]) -> bytes:
    return "".join(f"{at!r} {key} {tier}\n" for (tier, key), at in noted.items()).encode()


def _parsed(line: str) -> tuple[Deletion, float] | None:
    try:
        at, key, tier = line.split(" ", 2)
        return ((tier, KVKey.parse(key)), float(at)) if math.isfinite(float(at)) else None
    except ValueError:
        return None
