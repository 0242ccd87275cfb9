"""Chunk KV in files, one per chunk, in a folder that several processes may share.

Layout: ``<aa>/<key>.safetensors``, where aa are the chunk id's first hex digits; ``quarantine/``
for unusable files; ``index`` (see DiskIndex); ``deletions/`` is the store's (kv/deletions.py). A
file appears complete, by rename, and is never written again, so that readers need no lock; its
modification time is when its chunk was first stored. Only trusted processes may write to it.
"""

from __future__ import annotations

import logging
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import ClassVar
from uuid import uuid4

from torch import Tensor

from cacheblend_rag.errors import DamagedChunkError, StoreError
from cacheblend_rag.folders import make_folder
from cacheblend_rag.kv.chunk_kv import KVKey
from cacheblend_rag.kv.codec import ChunkObject
from cacheblend_rag.kv.read_memory import OF_PROCESS
from cacheblend_rag.kv.reader import StoredBytes
from cacheblend_rag.kv.shared_chunk import PARTS_AT_ONCE
from cacheblend_rag.kv.stored_chunk import Entry
from cacheblend_rag.kv.tiers.bytes import BytesTier, key_of, path_of, room_for
from cacheblend_rag.kv.tiers.disk_index import DiskIndex
from cacheblend_rag.kv.tiers.files import check_kind, new_file, write_parts
from cacheblend_rag.kv.tiers.policy import TierPolicy, Usage

logger = logging.getLogger(__name__)

INDEX = "index"
TEMPORARY_SUFFIX = ".tmp"
STALE_TEMPORARY_SECONDS = 3600.0
QUARANTINE_FILES = 16
SWEPT = 256
"""How many of the oldest chunks one sweep checks for expiry."""


class DiskTier(BytesTier):
    """Chunk KV as files; the least requested chunks are evicted first.

    capacity_bytes: file bytes, quarantine and files being written aside; None is without limit.
    Nobody waits until a file has reached the disk: a power cut damages recent chunks, whose
    checksums then fail.

    Raises StoreError when the folder cannot be created or written to, or is read-only and does not
    exist.
    """

    keeps_pins: ClassVar[bool] = True
    entries_at_once: ClassVar[int] = 1  # a file's status takes less time than a thread's start
    # Reading files takes processors, on which the pass computes. Fewer, larger reads slow it down
    # less, but the first layers are needed early.
    grown_range_bytes: ClassVar[int] = 1 << 22
    parts_at_once: ClassVar[int] = min(PARTS_AT_ONCE, 2 * (os.cpu_count() or 1))

    def __init__(
        self,
        path: str | os.PathLike[str],
        capacity_bytes: int | None = None,
        *,
        name: str = "disk",
        policy: TierPolicy | None = None,
    ) -> None:
        super().__init__(name, capacity_bytes, policy=policy)
        self.path = Path(path).expanduser().absolute()
        self._root = str(self.path)
        read_only = self.policy.read_only
        if read_only and not self.path.is_dir():
            raise StoreError(f"there is no chunk KV to read in {self.path}: index first")
        try:
            if not read_only:
                make_folder(self.path)
            self._index = DiskIndex(self.path / INDEX, self._files, read_only=read_only)
        except OSError as error:
            raise StoreError(f"cannot keep chunk KV in {self.path}: {error}") from error

    def entries(self) -> Iterator[tuple[KVKey, Entry]]:
        """Yield all chunk files, removing temporary files of killed writers."""
        used = self._index.last_uses()
        for key, entry in self._files():
            yield key, replace(entry, used_at=used.get(str(key), entry.used_at))

    def some_entries(self) -> Sequence[tuple[KVKey, Entry]]:
        """As for any tier: the oldest unpinned ones. Files that others deleted leave the index."""
        with suppress(OSError):
            with self._index.reading():
                oldest = self._index.oldest(SWEPT)
            gone = [key for key, _ in oldest if self._entry(key) is None]
            if gone:
                with self._index.writing():
                    for key in gone:
                        self._index.remove(key)
            return oldest
        return ()

    def has_relative(self, key: KVKey) -> bool:
        """As for any tier; reads the names in one of 256 folders, and no file."""
        with suppress(OSError):
            names = os.listdir(os.path.dirname(self._own_file(key)))
            others = (key_of(name) for name in names if key.chunk_id in name)
            return any(other is not None and key.is_relative(other) for other in others)
        return False

    def usage(self) -> Usage:
        """Return the usage by all processes of this folder; raises OSError."""
        if self.policy.read_only:
            return super().usage()
        with self._index.reading():
            return self._index.usage()

    def pin(self, *keys: KVKey) -> None:
        """As for any tier, for all processes of the folder; for this one if it is read-only.

        Raises StoreError when pins cannot be written, or are too many.
        """
        if self.policy.read_only:
            super().pin(*keys)
        else:
            self._to_pins(self._index.pin, keys)

    def unpin(self, *keys: KVKey) -> None:
        """Undo pin; raises StoreError."""
        if self.policy.read_only:
            super().unpin(*keys)
        else:
            self._to_pins(self._index.unpin, keys)

    def pinned(self) -> frozenset[KVKey]:
        """As for any tier, including other processes' pins."""
        return self._index.pins() | self._pinned

    def _to_pins(self, change: Callable[[Sequence[KVKey]], None], keys: Sequence[KVKey]) -> None:
        try:
            change(keys)
        except OSError as error:
            raise StoreError(f"cannot pin in {self.path}: {error}") from error

    def quarantined(self) -> list[str]:
        """Return the names of the files in quarantine, oldest first."""
        with suppress(FileNotFoundError):
            return sorted(os.listdir(self.path / "quarantine"))
        return []

    def close(self) -> None:
        """Close the index."""
        self._index.close()

    def _entry(self, key: KVKey) -> Entry | None:
        try:
            found = os.lstat(self._own_file(key))
        except FileNotFoundError:
            return None
        return _entry(found) if stat.S_ISREG(found.st_mode) else None

    def _read(self, key: KVKey, start: int, end: int) -> StoredBytes | None:
        """Read into private memory, so that later changes of the file have no effect.

        A memory map would save a copy, but would end the process if the file is truncated, and show
        bytes that are written after the check.
        """
        try:
            descriptor = os.open(self._own_file(key), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        with open(descriptor, "rb", buffering=0):
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise DamagedChunkError("no file")
            raw = read_range(descriptor, start, max(min(end, found.st_size) - start, 0))
        return StoredBytes(raw, found.st_size, found.st_mtime_ns / 1e9)

    def _mark_used(self, key: KVKey) -> None:
        self._index.note_use(key)

    def _write(self, key: KVKey, data: ChunkObject, written_at: float) -> None:
        with suppress(OSError), self._index.reading():
            self._victims(key, data.nbytes)  # refuses before a file is written in vain
        path = self._file(key)
        folder = os.path.dirname(path)
        make_folder(self._root)
        with suppress(FileExistsError):
            os.mkdir(folder, mode=0o700)
        _check_folder(folder)
        temporary = f"{path}.{uuid4().hex}{TEMPORARY_SUFFIX}"
        try:
            with new_file(temporary) as file:
                write_parts(file, data.parts())
            with self._index.writing():
                victims = self._victims(key, data.nbytes)
                for victim in victims:
                    self._index.remove(victim)
                    with suppress(FileNotFoundError):
                        os.unlink(self._file(victim))
                self._capacity.count(victims)
                self._index.add(key, data.nbytes, written_at)
                # Not before: until it is in place, its modification time says whether it is stale.
                os.utime(temporary, ns=(time.time_ns(), int(written_at * 1e9)))
                os.replace(temporary, path)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(temporary)

    def _victims(self, key: KVKey, nbytes: int) -> list[KVKey]:
        """Return the chunks to evict so that ``nbytes`` fit in place of ``key``."""
        if self.capacity_bytes is None:
            return []
        others, order = self._index.usage(without=key), self._index.coldest(key)
        return self._capacity.victims(key, nbytes, others, order)

    def _drop(self, key: KVKey) -> bool:
        return self._take_out(key, os.unlink)

    def _set_aside(self, key: KVKey) -> None:
        folder = self.path / "quarantine"
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.is_symlink():
            raise OSError(f"{folder} is a link: nothing is written through it")
        target = folder / f"{time.time_ns()}.{key}"
        self._take_out(key, lambda path: os.replace(path, target))
        for name in self.quarantined()[:-QUARANTINE_FILES]:
            (folder / name).unlink(missing_ok=True)

    def _take_out(self, key: KVKey, remove: Callable[[str], object]) -> bool:
        """Remove a chunk's file; returns whether it was there."""
        with self._index.writing():
            self._index.remove(key)
            try:
                remove(self._own_file(key))
            except FileNotFoundError:
                return False
        return True

    def _file(self, key: KVKey) -> str:
        return os.path.join(self._root, path_of(key))

    def _own_file(self, key: KVKey) -> str:
        """Return a chunk's path; raises OSError as ``_check_folder`` of its folder."""
        path = self._file(key)
        _check_folder(os.path.dirname(path))
        return path

    def _files(self) -> Iterator[tuple[KVKey, Entry]]:
        for number in range(256):
            yield from self._files_in(os.path.join(self._root, f"{number:02x}"))

    def _files_in(self, folder: str) -> Iterator[tuple[KVKey, Entry]]:
        try:
            _check_folder(folder)
            found = list(os.scandir(folder))
        except FileNotFoundError:
            return
        except OSError as error:
            logger.warning("%s tier: not listed: %s", self.name, error)
            return
        for item in found:
            with suppress(FileNotFoundError):  # evicted meanwhile
                status = item.stat(follow_symlinks=False)
                if not stat.S_ISREG(status.st_mode):
                    continue
                if item.name.endswith(TEMPORARY_SUFFIX):
                    age = time.time() - status.st_mtime
                    if age > STALE_TEMPORARY_SECONDS and not self.policy.read_only:
                        os.unlink(item.path)
                elif key := key_of(item.name):
                    yield key, _entry(status)


def read_range(file: int, start: int, nbytes: int) -> Tensor:
    """Read ``nbytes`` of an open file from offset ``start``; returns (nbytes,) uint8.

    Raises OSError, and DamagedChunkError if the file is shorter or no chunk can be that large.
    """
    buffer = OF_PROCESS.room(nbytes)
    raw = room_for(nbytes) if buffer is None else buffer
    view, done = raw.numpy().data, 0
    while done < nbytes:
        count = os.preadv(file, [view[done:]], start + done)
        if not count:
            raise DamagedChunkError("was cut short: the file ends before the chunk does")
        done += count
    return raw


def _check_folder(path: str) -> None:
    """Raise OSError for a link, a pipe or a file in a folder's place, and for none."""
    check_kind(path, os.lstat(path), stat.S_ISDIR, "folder")


def _entry(found: os.stat_result) -> Entry:
    """Return a file's entry, with the time of writing as that of the last use."""
    return Entry(found.st_size, found.st_mtime, found.st_mtime)
