"""Exports and imports chunks, as a folder or a tar with one object per chunk.

Imported files are not trusted: a file is read only if its name is a KV key, and its name is never
used as a path; it is checked like everything read from a store, and nothing is unpacked.
"""

from __future__ import annotations

import errno
import io
import os
import shutil
import stat
import tarfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from cacheblend_rag.admin.select import Condition
from cacheblend_rag.errors import DamagedChunkError, ForeignChunkError, StoreError
from cacheblend_rag.kv import TieredKVStore, codec
from cacheblend_rag.kv.tiers.bytes import SUFFIX, key_of

MOST_OBJECT_BYTES = 1 << 32
TAR = ".tar"

Write = Callable[[str, bytes, float], None]


@dataclass
class MoveReport:
    """The number and bytes of moved chunks, and the skipped files or keys with reasons."""

    moved: int = 0
    nbytes: int = 0
    skipped: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Object:
    """A file that may be a chunk. read: returns its bytes, or why it cannot be read."""

    name: str
    nbytes: int
    written_at: float
    read: Callable[[], bytes]


def export(store: TieredKVStore, condition: Condition, target: Path) -> MoveReport:
    """Write chunks, one object each, into a new folder, or a new tar if the name ends so.

    The target appears under its name once it is complete. Raises StoreError when it exists already
    or cannot be written.
    """
    report = MoveReport()
    chosen = {key: entry for key, entry in store.entries().items() if condition(key, entry)}
    try:
        with _writer(target) as write:
            for key, entry in chosen.items():
                found = store.get(key, promote=False)
                if found.kv is None:
                    report.skipped[str(key)] = found.reason or "not stored"
                    continue
                data = codec.encode(key, found.kv, store.mac)
                write(f"{key}{SUFFIX}", data, entry.written_at)
                report.moved += 1
                report.nbytes += len(data)
    except FileExistsError as error:
        raise StoreError(f"{target} exists already: give another name") from error
    except OSError as error:
        raise StoreError(f"{target} cannot be written: {error.strerror or error}") from error
    return report


def import_chunks(store: TieredKVStore, source: Path, most_bytes: int | None = None) -> MoveReport:
    """Check and store the chunks of an export, up to ``most_bytes`` in total.

    Raises StoreError when there is nothing to read.
    """
    report = MoveReport()
    try:
        for found in _objects(source):
            reason = _take(store, found, report, most_bytes)
            if reason is not None:
                report.skipped[found.name] = reason
    except (OSError, tarfile.TarError) as error:
        raise StoreError(f"{source} cannot be read: {error}") from error
    return report


def _take(
    store: TieredKVStore, found: _Object, report: MoveReport, most_bytes: int | None
) -> str | None:
    """Check and store an object; returns why it was not, or None."""
    if (key := key_of(found.name)) is None:
        return "its name is not a KV key"
    if found.nbytes > MOST_OBJECT_BYTES:
        return f"more than {MOST_OBJECT_BYTES} bytes"
    if most_bytes is not None and report.nbytes + found.nbytes > most_bytes:
        return "exceeds the given limit"
    try:
        kv = codec.decode(bytearray(found.read()), key, store.mac)
    except (DamagedChunkError, ForeignChunkError) as error:
        return str(error)
    except OSError as error:
        return error.strerror or str(error)
    written_at = max(0.0, min(found.written_at, time.time()))  # told by the file: never ahead
    if not store.put(key, kv, written_at=written_at):
        return "the store did not take it"
    report.moved += 1
    report.nbytes += found.nbytes
    return None


@contextmanager
def _writer(target: Path) -> Iterator[Write]:
    """Create a tar or a folder, accessible to its owner only; yields a function that adds a file.

    Raises FileExistsError when the name exists.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with _renamed_when_whole(target) as begun:
        if target.suffix == TAR:
            with _tar_writer(begun) as write:
                yield write
        else:
            begun.mkdir(mode=0o700)
            yield lambda name, data, written_at: _write_file(begun / name, data, written_at)


@contextmanager
def _renamed_when_whole(target: Path) -> Iterator[Path]:
    """Yield a temporary name beside ``target``, renamed at the end and removed after a failure.

    A failed export leaves nothing that looks complete or blocks the next one.
    """
    _check_absent(target)
    begun = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    try:
        yield begun
        _check_absent(target)
        begun.rename(target)
    except BaseException:
        if begun.is_dir():
            shutil.rmtree(begun, ignore_errors=True)
        else:
            begun.unlink(missing_ok=True)
        raise


def _check_absent(target: Path) -> None:
    if os.path.lexists(target):
        raise FileExistsError(errno.EEXIST, "exists already", str(target))


@contextmanager
def _tar_writer(path: Path) -> Iterator[Write]:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file, tarfile.open(fileobj=file, mode="w|") as tar:

        def write(name: str, data: bytes, written_at: float) -> None:
            member = tarfile.TarInfo(name)
            member.size, member.mtime, member.mode = len(data), written_at, 0o600
            tar.addfile(member, io.BytesIO(data))

        yield write


def _write_file(path: Path, data: bytes, written_at: float) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(data)
    os.utime(path, (written_at, written_at))


def _objects(source: Path) -> Iterator[_Object]:
    if source.is_dir():
        yield from _in_folder(source)
    elif source.is_file():
        yield from _in_tar(source)
    else:
        raise StoreError(f"{source} is neither a folder nor a tar")


def _in_folder(folder: Path) -> Iterator[_Object]:
    """Yield a folder's files; links count as files that cannot be read."""
    for item in sorted(os.scandir(folder), key=lambda item: item.name):
        found = item.stat(follow_symlinks=False)
        yield _Object(item.name, found.st_size, found.st_mtime, _reader(item.path, found.st_size))


def _reader(path: str, nbytes: int) -> Callable[[], bytes]:
    def read() -> bytes:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise DamagedChunkError("no file")
            return file.read(nbytes)

    return read


def _in_tar(path: Path) -> Iterator[_Object]:
    """Yield a tar's members in order; only plain, uncompressed files are read."""
    with path.open("rb") as file, tarfile.open(fileobj=file, mode="r|") as tar:
        for member in tar:
            taken = tar.extractfile(member) if member.isreg() else None
            yield _Object(
                member.name, member.size, float(member.mtime), _member_reader(taken, member.size)
            )
            tar.members.clear()  # type: ignore[attr-defined]  # a long tar is not kept in memory


def _member_reader(taken: IO[bytes] | None, nbytes: int) -> Callable[[], bytes]:
    def read() -> bytes:
        if taken is None:
            raise DamagedChunkError("no file")
        with suppress(tarfile.TarError):
            return taken.read(nbytes)
        raise DamagedChunkError("was cut short")

    return read
