"""Deletions that a tier could not carry out: their chunks are not read, and deleted later."""

from __future__ import annotations

import logging
import math
import os
import stat
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock

from cacheblend_rag.errors import StoreError
from cacheblend_rag.folders import make_folder
from cacheblend_rag.kv.chunk_kv import KVKey
from cacheblend_rag.kv.tiers.files import check_kind

logger = logging.getLogger(__name__)

MOST_DELETIONS = 100_000

Deletion = tuple[str, KVKey]
"""A tier's name, and the key of the chunk to delete there."""


class Deletions:
    """Deletions that wait for their tiers, with their times; safe to share between threads.

    Each is an empty file in the folder ``deletions``, named by its time, key and tier, which all
    processes share that keep their store or registry in the folder above. Without a folder, or
    where it cannot be written to, they are kept in this process' memory. Other files are skipped.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = None if folder is None else folder / "deletions"
        self._mutex = Lock()
        self._waiting: dict[Deletion, float] = {}
        self._unwritten: dict[Deletion, float] = {}
        self._names = set[str]()
        self._warned = ""
        self.refresh()

    def __len__(self) -> int:
        """Return how many deletions wait."""
        return len(self._waiting)

    def hides(self, tier: str, key: KVKey, written_at: float) -> bool:
        """Whether a tier's copy of a chunk, by the time it was first stored, is to be deleted."""
        return written_at <= self._waiting.get((tier, key), -math.inf)

    def of(self, tier: str) -> list[tuple[KVKey, float]]:
        """Return a tier's deletions, each with its time."""
        with self._mutex:
            return [(key, at) for (name, key), at in self._waiting.items() if name == tier]

    def add(self, tiers: Sequence[str], key: KVKey, at: float) -> bool:
        """Note that tiers must delete a chunk's copies from before a time.

        Returns:
            Whether this is noted on disk, where it outlives the process.

        Raises:
            StoreError: when too many deletions wait.
        """
        if len(self) + len(tiers) > MOST_DELETIONS:
            raise StoreError(
                f"{len(self)} deletions wait for tiers that do not answer ({', '.join(tiers)}): "
                "delete this again once they do"
            )
        new = {(tier, key): at for tier in tiers}
        with self._mutex:
            self._waiting.update(new)
            try:
                if self._folder is None:
                    raise FileNotFoundError("the store has no folder: give kv_path")
                make_folder(self._folder)
                self._check_folder(self._folder)
                for tier in tiers:
                    (self._folder / _name(tier, key, at)).touch(mode=0o600)
            except OSError as error:
                logger.warning("deletions are kept until this process ends: %s", error)
                self._unwritten.update(new)
                return False
        return True

    def remove(self, tier: str, done: Iterable[tuple[KVKey, float]]) -> None:
        """Remove deletions of a tier that are carried out, unless they were noted again."""
        with self._mutex:
            for key, at in done:
                for noted in (self._waiting, self._unwritten):
                    if noted.get((tier, key)) == at:
                        del noted[tier, key]
                if self._folder is not None:
                    with suppress(OSError):  # the next process carries it out, and finds nothing
                        (self._folder / _name(tier, key, at)).unlink()

    def refresh(self) -> None:
        """Read what other processes have noted, or carried out, since the last call."""
        if self._folder is None:
            return
        with self._mutex:
            try:
                self._check_folder(self._folder)
                names = set(os.listdir(self._folder))
            except FileNotFoundError:
                names = set()
            except OSError as error:
                if str(error) != self._warned:  # it is read every second
                    logger.warning("deletions cannot be read: %s", error)
                self._warned = str(error)
                return
            if names != self._names:
                noted = [one for name in names if (one := _parsed(name)) is not None]
                latest = sorted(noted, key=lambda one: one[1])[-MOST_DELETIONS:]
                self._names, self._waiting = names, {**dict(latest), **self._unwritten}

    def _check_folder(self, folder: Path) -> None:
        check_kind(str(folder), os.lstat(folder), stat.S_ISDIR, "folder")


def _name(tier: str, key: KVKey, at: float) -> str:
    return f"{at!r} {key} {tier}"


def _parsed(name: str) -> tuple[Deletion, float] | None:
    try:
        at, key, tier = name.split(" ", 2)
        return ((tier, KVKey.parse(key)), float(at)) if math.isfinite(float(at)) else None
    except ValueError:
        return None
