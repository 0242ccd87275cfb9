"""Where the records of a catalogue are kept: beside the KV, in the tier that most servers share.

A Redis comes before an object store, and that before a folder. Each is asked through its tier's
client. Anyone who can write to a place can write records: sizes are bounded before one is read.
"""

from __future__ import annotations

import os
import re
import stat
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar
from uuid import uuid4

from cacheblend_rag.folders import make_folder
from cacheblend_rag.kv.tiers.files import check_kind, new_file, read_regular, write_parts
from cacheblend_rag.kv.tiers.object_client import ObjectClient
from cacheblend_rag.kv.tiers.redis import ANSWER_BYTES, PREFIX, TIMEOUT_SECONDS, asking, connect
from cacheblend_rag.kv.tiers.urls import object_store, redis_place
from cacheblend_rag.settings import StoreConfig
from cacheblend_rag.settings.tier_url import OBJECT_SCHEMES, REDIS_SCHEMES, TierUrl

FOLDER = "tokens"
RECORD_BYTES = 8 << 20
"""Of the largest record that is read."""
NAMES_BYTES = 64 << 20
"""Of the names of all records."""
MOST_RECORDS = 1 << 20
SETTLED_SECONDS = 2.0
"""After which a folder's time of change is sure to be another one at its next change."""
STALE_SECONDS = 3600.0
TEMPORARY = ".tmp"
_NAME = re.compile(r"[0-9a-f]{32}")


class Place(ABC):
    """Keeps the records of one model by their names, 32 hex digits; methods raise OSError.

    seconds: from one look for news to the next. folder: of the records, below the tier's place.
    identity: is another one once the place has lost all records, which nobody removed. seen: what
    says that names are the same as before; without it they are listed again.
    """

    seconds: ClassVar[float] = 2.0

    def __init__(self, name: str, model: str) -> None:
        self._name, self.folder = name, f"{FOLDER}/{model}/"
        self.identity: bytes | None = None
        self.seen: Any = None

    def __str__(self) -> str:
        return f"{self._name} tier"

    @abstractmethod
    def names(self) -> set[str] | None:
        """Return the names of all records; None if they are the same as at the last call."""

    @abstractmethod
    def read(self, names: Sequence[str]) -> Mapping[str, bytes]:
        """Return records; b"" for one that is too large, none for one that cannot be read."""

    @abstractmethod
    def write(self, name: str, data: bytes) -> None:
        """Write a record."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Remove a record if it is there."""

    def close(self) -> None:  # noqa: B027 (most have none)
        """Close connections."""


class InFolder(Place):
    """Files in ``tokens/<model>/`` of a folder; a file appears complete, by rename."""

    def __init__(self, path: Path, model: str) -> None:
        super().__init__("disk", model)
        self._path = path / self.folder
        self._left_behind: list[str] = []

    def names(self) -> set[str] | None:
        """As of any place: the folder's time of change says whether they are the same."""
        try:
            found = self._checked()
        except FileNotFoundError:
            return set()
        if found.st_mtime_ns == self.seen:
            return None
        is_settled = time.time() - found.st_mtime > SETTLED_SECONDS
        with os.scandir(self._path) as entries:
            listed = {one.name for one in entries if one.is_file(follow_symlinks=False)}
        self._left_behind = [name for name in listed if name.endswith(TEMPORARY)]
        self.seen = found.st_mtime_ns if is_settled else None
        return {name for name in listed if _NAME.fullmatch(name)}

    def read(self, names: Sequence[str]) -> Mapping[str, bytes]:
        """As of any place."""
        found = {}
        for name in names:
            with suppress(OSError):
                found[name] = read_regular(self._path / name, RECORD_BYTES)
        return found

    def write(self, name: str, data: bytes) -> None:
        """As of any place; removes what a killed writer left behind."""
        make_folder(self._path)
        self._checked()
        self._tidy()
        temporary = f"{self._path / name}.{uuid4().hex}{TEMPORARY}"
        try:
            with new_file(temporary) as file:
                write_parts(file, [data])
            os.replace(temporary, self._path / name)
        finally:
            with suppress(FileNotFoundError):
                os.unlink(temporary)

    def remove(self, name: str) -> None:
        """As of any place."""
        (self._path / name).unlink(missing_ok=True)

    def _checked(self) -> os.stat_result:
        """Return the folder's status; raises OSError for a link or a file in place of it."""
        found = os.lstat(self._path)
        check_kind(str(self._path), found, stat.S_ISDIR, "folder")
        return found

    def _tidy(self) -> None:
        for name in self._left_behind:
            with suppress(FileNotFoundError):
                if time.time() - os.lstat(self._path / name).st_mtime > STALE_SECONDS:
                    os.unlink(self._path / name)
        self._left_behind = []


class InRedis(Place):
    """A hash of records under ``tokens/<model>/`` after the tier's prefix.

    Its field ``id`` is another one when the server has lost the hash, and ``changes`` counts.
    Raises MissingExtraError and StoreError as ``connect``; the server is not contacted.
    """

    def __init__(self, url: TierUrl, model: str) -> None:
        super().__init__(url.name, model)
        self._limit = url.options.get("timeout") or TIMEOUT_SECONDS
        self._client = connect(**redis_place(url), seconds=self._limit)
        self._key = f"{url.options.get('prefix', PREFIX)}{self.folder}"

    def names(self) -> set[str] | None:
        """As of any place."""
        with asking(self._limit, NAMES_BYTES):
            self.identity, changes = self._client.hmget(self._key, "id", "changes")
            if self.identity is not None and self.seen == (self.identity, changes):
                return None
            fields = self._client.hkeys(self._key)
        self.seen = self.identity, changes
        names = {field.decode("ascii", "replace") for field in fields}
        return {name for name in names if _NAME.fullmatch(name)}

    def read(self, names: Sequence[str]) -> Mapping[str, bytes]:
        """As of any place; the server says how large they are before it sends them."""
        sizes = self._told(lambda pipe: [pipe.hstrlen(self._key, name) for name in names])
        fitting = [name for name, size in zip(names, sizes, strict=True) if size <= RECORD_BYTES]
        found = dict.fromkeys(names, b"")
        if fitting:
            with asking(self._limit, len(fitting) * RECORD_BYTES + ANSWER_BYTES):
                found.update(zip(fitting, self._client.hmget(self._key, fitting), strict=True))
        return {name: data for name, data in found.items() if data is not None}

    def write(self, name: str, data: bytes) -> None:
        """As of any place."""

        def change(pipe: Any) -> None:
            pipe.hsetnx(self._key, "id", uuid4().hex)
            pipe.hget(self._key, "id")
            pipe.hset(self._key, name, data)
            pipe.hincrby(self._key, "changes")

        self.identity = self._told(change)[1]

    def remove(self, name: str) -> None:
        """As of any place."""

        def change(pipe: Any) -> None:
            pipe.hdel(self._key, name)
            pipe.hincrby(self._key, "changes")

        self._told(change)

    def close(self) -> None:
        """As of any place."""
        self._client.close()

    def _told(self, ask: Callable[[Any], object]) -> list[Any]:
        """Return the answers to several commands, which are run as one."""
        with asking(self._limit, NAMES_BYTES), self._client.pipeline(transaction=True) as pipe:
            ask(pipe)
            return list(pipe.execute())


class InObjects(Place):
    """Objects in ``tokens/<model>/`` after the tier's prefix.

    Raises MissingExtraError and StoreError as ``open_store``; the store is not contacted.
    """

    seconds: ClassVar[float] = 55.0  # each listing is a request to pay for
    timeout_seconds: ClassVar[float] = 10.0

    def __init__(self, url: TierUrl, model: str) -> None:
        super().__init__(url.name, model)
        seconds = min(url.options.get("timeout") or self.timeout_seconds, self.timeout_seconds)
        self._client = ObjectClient(object_store(url, seconds))
        self._large: set[str] = set()

    def names(self) -> set[str] | None:
        """As of any place."""
        sizes: dict[str, int] = {}
        for page in self._client.pages(self.folder):
            listed = ((meta["path"].removeprefix(self.folder), meta["size"]) for meta in page)
            sizes.update((name, size) for name, size in listed if _NAME.fullmatch(name))
            if len(sizes) > MOST_RECORDS:
                raise OSError(f"{self.folder} has more than {MOST_RECORDS} records")
        self._large = {name for name, size in sizes.items() if size > RECORD_BYTES}
        return {*sizes}

    def read(self, names: Sequence[str]) -> Mapping[str, bytes]:
        """As of any place."""
        fitting = [name for name in names if name not in self._large]
        paths = [f"{self.folder}{name}" for name in fitting]
        read = zip(fitting, self._client.read_many(paths, RECORD_BYTES), strict=True)
        found = {name: data for name, data in read if isinstance(data, bytes)}
        return {**dict.fromkeys(self._large.intersection(names), b""), **found}

    def write(self, name: str, data: bytes) -> None:
        """As of any place."""
        self._client.put(f"{self.folder}{name}", [data])

    def remove(self, name: str) -> None:
        """As of any place."""
        self._client.delete(f"{self.folder}{name}")


def place_of(store: StoreConfig) -> Path | TierUrl | None:
    """Return the folder or the tier that keeps records; None if all tiers end with the process."""
    for schemes in (REDIS_SCHEMES, OBJECT_SCHEMES):
        for url in store.urls:
            if url.scheme in schemes and url.outlives:
                return url
    return Path(store.kv_path) if store.kv_path and store.outlives else None


def open_place(where: Path | TierUrl, model: str) -> Place:
    """Return the place of a model's records in what ``place_of`` returned; raises as it says."""
    if isinstance(where, Path):
        return InFolder(where, model)
    return InRedis(where, model) if where.scheme in REDIS_SCHEMES else InObjects(where, model)
