"""Chunk KV in files, one per chunk, in a folder that several processes may share.

Layout: ``<a>/<b>/<key>.safetensors``, where a and b are the chunk id's first hex digits;
``quarantine/`` for unusable files, each beside a ``.reason``; ``usage`` (entries and bytes),
``pins`` (keys) and ``lock``; ``deletions`` are the store's (kv/deletions.py). A file appears
complete, by rename, and is never written again, so readers need no lock; its access time is its
last use, its modification time when it was written. Only trusted processes may write to the folder.
"""

from __future__ import annotations

import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar
from uuid import uuid4

from filelock import FileLock
from torch import Tensor

from cacheblend_rag.errors import DamagedChunkError, StoreError
from cacheblend_rag.folders import make_folder
from cacheblend_rag.kv.chunk_kv import KVKey
from cacheblend_rag.kv.codec import ChunkObject
from cacheblend_rag.kv.read_memory import OF_PROCESS
from cacheblend_rag.kv.reader import StoredBytes
from cacheblend_rag.kv.shared_chunk import PARTS_AT_ONCE
from cacheblend_rag.kv.stored_chunk import Entry
from cacheblend_rag.kv.tiers.admission import RejectedError, Resident
from cacheblend_rag.kv.tiers.bytes import SUFFIX, BytesTier, key_of, room_for
from cacheblend_rag.kv.tiers.files import (
    PinFile,
    UsageFile,
    check_kind,
    create,
    new_file,
    write_parts,
)
from cacheblend_rag.kv.tiers.policy import TierPolicy, Usage

logger = logging.getLogger(__name__)

TEMPORARY_SUFFIX = ".tmp"
STALE_TEMPORARY_SECONDS = 3600.0
LOCK_TIMEOUT_SECONDS = 10.0
QUARANTINE_FILES = 16
SAME_USE_SECONDS = 60.0
"""Most seconds between computing a chunk and creating its file."""
LATELY_SECONDS = 86_400.0
SWEPT_FOLDERS = 4
"""How many of the 256 folders are searched at a time for expired chunks."""

_HEX = "0123456789abcdef"


@dataclass(frozen=True, slots=True)
class _File:
    key: KVKey
    path: str
    entry: Entry


class DiskTier(BytesTier):
    """Chunk KV as files; the least requested chunks are evicted first.

    capacity_bytes: file bytes, quarantine and files being written aside; None is without limit.
    fsync: wait until each file has reached the disk; without it a power cut may only damage recent
    chunks, whose checksums then fail.

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
        fsync: bool = False,
        name: str = "disk",
        policy: TierPolicy | None = None,
    ) -> None:
        super().__init__(name, capacity_bytes, policy=policy)
        self.path = Path(path).expanduser().absolute()
        self._root = str(self.path)
        self._fsync = fsync
        self._pins, self._usage = PinFile(self.path / "pins"), UsageFile(self.path / "usage")
        self._mutex = threading.Lock()
        self._swept, self._told = 0, set[str]()
        self._lock = os.path.join(self._root, "lock")
        self._file_lock = FileLock(self._lock, timeout=LOCK_TIMEOUT_SECONDS, mode=0o600)
        if self.policy.read_only:
            if not self.path.is_dir():
                raise StoreError(f"there is no chunk KV to read in {self.path}: index first")
            return
        try:
            make_folder(self.path)
            with self._exclusive():
                self._usage.write(self._scan())
        except OSError as error:
            raise StoreError(f"cannot keep chunk KV in {self.path}: {error}") from error

    def entries(self) -> Iterator[tuple[KVKey, Entry]]:
        """Yield all chunk files, removing temporary files of killed writers."""
        return ((file.key, file.entry) for file in self._files())

    def some_entries(self) -> list[tuple[KVKey, Entry]]:
        """As for any tier: the files of some of the 256 folders, the next ones each time."""
        first, self._swept = self._swept, self._swept + SWEPT_FOLDERS
        folders = [index % len(_HEX) ** 2 for index in range(first, first + SWEPT_FOLDERS)]
        pairs = [divmod(index, len(_HEX)) for index in folders]
        return [
            (file.key, file.entry)
            for one, other in pairs
            for file in self._files_in(_HEX[one], _HEX[other])
        ]

    def has_relative(self, key: KVKey) -> bool:
        """As for any tier; reads the names in one of 256 folders, and no file."""
        with suppress(OSError):
            names = os.listdir(os.path.dirname(self._own_file(key)))
            others = (key_of(name) for name in names if key.chunk_id in name)
            return any(other is not None and key.is_relative(other) for other in others)
        return False

    def usage(self) -> Usage:
        """Return the usage by all processes of this folder; raises StoreError."""
        try:
            with self._exclusive():
                return self._usage.read() or self._scan()
        except OSError as error:
            raise StoreError(f"cannot read {self.path}: {error}") from error

    def check(self, key: KVKey) -> str | None:
        """As for any tier; that is no use of the chunk, whatever the mount's atime option."""
        try:
            before = os.lstat(self._own_file(key))
        except OSError:
            return super().check(key)
        wrong = super().check(key)
        with suppress(OSError):
            if not self.policy.read_only:
                times = before.st_atime_ns, before.st_mtime_ns
                os.utime(self._file(key), ns=times, follow_symlinks=False)
        return wrong

    def pin(self, *keys: KVKey) -> None:
        """As for any tier, for all processes of the folder; for this one if it is read-only."""
        if self.policy.read_only:
            super().pin(*keys)
        else:
            self._write_pins(set(keys), set())

    def unpin(self, *keys: KVKey) -> None:
        """Undo pin; raises StoreError."""
        if self.policy.read_only:
            super().unpin(*keys)
        else:
            self._write_pins(set(), set(keys))

    def pinned(self) -> frozenset[KVKey]:
        """As for any tier, including other processes' pins."""
        return self._pins.keys() | self._pinned

    def is_pinned(self, key: KVKey) -> bool:
        """As for any tier, including other processes' pins."""
        return key in self._pinned or key in self._pins.keys()  # noqa: SIM118  # a method

    def _write_pins(self, more: set[KVKey], fewer: set[KVKey]) -> None:
        try:
            with self._exclusive():
                self._pins.write((self._pins.current() | more) - fewer)
        except OSError as error:
            raise StoreError(f"cannot pin in {self.path}: {error}") from error

    def quarantined(self) -> list[str]:
        """Return the names of the files in quarantine, oldest first."""
        with suppress(FileNotFoundError):
            names = os.listdir(self.path / "quarantine")
            return sorted((n for n in names if not n.endswith(".reason")), key=_quarantine_time)
        return []

    def _entry(self, key: KVKey) -> Entry | None:
        try:
            found = os.lstat(self._own_file(key))
        except FileNotFoundError:
            return None
        return _entry(found) if stat.S_ISREG(found.st_mode) else None

    def _read(self, key: KVKey, start: int = 0, end: int | None = None) -> StoredBytes | None:
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
            last = found.st_size if end is None else min(end, found.st_size)
            raw = read_range(descriptor, start, max(last - start, 0))
        return StoredBytes(raw, found.st_size, found.st_mtime_ns / 1e9)

    def _mark_used(self, key: KVKey) -> None:
        with suppress(OSError):
            path = self._own_file(key)
            times = time.time_ns(), os.lstat(path).st_mtime_ns
            os.utime(path, ns=times, follow_symlinks=False)

    def _write(self, key: KVKey, data: ChunkObject, written_at: float) -> None:
        path = self._file(key)
        if self._capacity.would_reject(key) and not os.path.exists(path):
            raise RejectedError("another chunk requested as often was rejected just now")
        self._make_folders(path)
        temporary = f"{path}.{uuid4().hex}{TEMPORARY_SUFFIX}"
        try:
            with new_file(temporary, fsync=self._fsync) as file:
                write_parts(file, data.parts())
            with self._exclusive():
                os.stat(temporary)  # gone if another clock is far ahead: record nothing
                self._usage.write(self._make_room(key, data.nbytes))
                # Not before: until it is in place, its modification time says whether it is stale.
                os.utime(temporary, ns=(time.time_ns(), int(written_at * 1e9)))
                os.replace(temporary, path)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(temporary)

    def _drop(self, key: KVKey) -> bool:
        return self._take_out(key, os.unlink)

    def _set_aside(self, key: KVKey, reason: str) -> None:
        folder = self.path / "quarantine"
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.is_symlink():
            raise OSError(f"{folder} is a link: nothing is written through it")
        target = folder / f"{key}.{time.time_ns()}"
        if not self._take_out(key, lambda path: os.replace(path, target)):
            return  # another reader was faster
        create(f"{target}.reason", f"{reason}\n".encode(), fsync=self._fsync)
        for name in self.quarantined()[:-QUARANTINE_FILES]:
            for leaf in (name, f"{name}.reason"):
                (folder / leaf).unlink(missing_ok=True)

    def _file(self, key: KVKey) -> str:
        return file_of(self._root, key)

    def _own_file(self, key: KVKey) -> str:
        """Return a chunk's path, after checking that its folders are real folders.

        Raises OSError for a link, a pipe or a file in place of one, FileNotFoundError if there is
        none.
        """
        path = self._file(key)
        leaf = os.path.dirname(path)
        for folder in (os.path.dirname(leaf), leaf):
            check_kind(folder, os.lstat(folder), stat.S_ISDIR, "folder")
        return path

    def _make_folders(self, path: str) -> None:
        leaf = os.path.dirname(path)
        make_folder(self._root)
        for folder in (os.path.dirname(leaf), leaf):
            with suppress(FileExistsError):
                os.mkdir(folder, mode=0o700)
            check_kind(folder, os.lstat(folder), stat.S_ISDIR, "folder")

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Lock the folder against other threads and processes; raises OSError after a timeout.

        Readers take no lock: files appear by rename.
        """
        if self.policy.read_only:
            yield
            return
        with self._mutex:
            with suppress(FileNotFoundError):
                check_kind(self._lock, os.lstat(self._lock), stat.S_ISREG, "file")
            with self._file_lock.acquire(poll_interval=0.005):
                yield

    def _files(self) -> Iterator[_File]:
        for first in _HEX:
            for second in _HEX:
                yield from self._files_in(first, second)

    def _files_in(self, first: str, second: str) -> Iterator[_File]:
        above = os.path.join(self._root, first)
        folder = os.path.join(above, second)
        try:
            for path in (above, folder):
                check_kind(path, os.lstat(path), stat.S_ISDIR, "folder")
            found = list(os.scandir(folder))
        except FileNotFoundError:
            return
        except OSError as error:
            if str(error) not in self._told:
                self._told.add(str(error))
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
                    yield _File(key, item.path, _entry(status))

    def _scan(self) -> Usage:
        sizes = [file.entry.nbytes for file in self._files()]
        return Usage(len(sizes), sum(sizes))

    def _make_room(self, key: KVKey, nbytes: int) -> Usage:
        """Evict until ``nbytes`` fit in place of ``key``; returns the usage once they are stored.

        Under the lock. Refuses before evicting in vain.
        """
        usage = self._usage.read() or self._scan()
        own = self._entry(key)
        if own is not None:
            usage = Usage(usage.entries - 1, usage.nbytes - own.nbytes)
        after = Usage(usage.entries + 1, usage.nbytes + nbytes)
        if self.capacity_bytes is None or after.nbytes <= self.capacity_bytes:
            return after
        # The files themselves are the truth: a killed writer or a bare `rm` leaves `usage` high.
        others = [file for file in self._files() if file.key != key]
        stored = sum(file.entry.nbytes for file in others)
        victims = self._capacity.evicted_for(
            key,
            self._oldest_first(others),
            excess=stored + nbytes - self.capacity_bytes,
            held=len(others),
            spare=stored // 64,  # so that a large full store is not searched at each put
        )
        left = {file.key: file.entry.nbytes for file in others}
        for victim in victims:
            with suppress(FileNotFoundError):
                os.unlink(self._file(victim))
            del left[victim]
        return Usage(len(left) + 1, sum(left.values()) + nbytes)

    def _oldest_first(self, files: list[_File]) -> list[Resident]:
        now, pinned = time.time(), self.pinned()
        return [
            Resident(file.key, file.entry.nbytes, _seen(file.entry, now))
            for file in sorted(files, key=lambda file: file.entry.used_at)
            if file.key not in pinned
        ]

    def _take_out(self, key: KVKey, remove: Callable[[str], object]) -> bool:
        """Remove a chunk's file and count it off; returns whether it was there."""
        with self._exclusive():
            usage = self._usage.read() or self._scan()
            try:
                path = self._own_file(key)
                nbytes = os.lstat(path).st_size
                remove(path)
            except FileNotFoundError:
                return False
            self._usage.write(Usage(usage.entries - 1, usage.nbytes - nbytes))
        return True


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


def file_of(folder: str | os.PathLike[str], key: KVKey) -> str:
    """Return the path of a chunk's file in a tier's folder."""
    return os.path.join(folder, key.chunk_id[0], key.chunk_id[1], f"{key}{SUFFIX}")


def _entry(found: os.stat_result) -> Entry:
    return Entry(found.st_size, found.st_mtime, found.st_atime)


def _seen(entry: Entry, now: float) -> int:
    """Return a lower bound of a file's recent accesses by any process, from its times.

    Processes do not see each other's accesses, but a file that was read since it was written was
    seen more than once.
    """
    again = entry.used_at > entry.written_at + SAME_USE_SECONDS
    return 2 if again and now - entry.used_at < LATELY_SECONDS else 0


def _quarantine_time(name: str) -> int:
    tail = name.rpartition(".")[2]
    return int(tail) if tail.isdigit() else 0
