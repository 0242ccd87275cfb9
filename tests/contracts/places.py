"""Places where tiers keep chunks, as strangers reach them: list, read, forge and delete objects."""

from __future__ import annotations

import uuid
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from resource import RLIMIT_FSIZE, getrlimit, setrlimit
from typing import Any, Self

from obstore.store import S3Store
from redis import Redis

from tests.faulty_proxy import FaultyProxy
from tests.local_servers import BUCKET, HOST, Server, redis_server, s3_server

LEAST_BYTES = 1 << 10
"""Of a chunk's object in a place whose other objects are smaller."""


class Place(ABC):
    """A tier's place. ``kind`` is what reports call the tier, ``proxy`` what stands before it."""

    kind: str
    proxy: FaultyProxy | None = None
    server: Server | None = None

    @abstractmethod
    def url(self, options: str = "") -> str:
        """Return the tier's URL."""

    @abstractmethod
    def objects(self) -> dict[str, bytes]:
        """Return the objects of chunks by their names, without what was set aside."""

    @abstractmethod
    def put(self, name: str, data: bytes) -> None:
        """Replace an object."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Delete an object."""

    def filled_up(self) -> AbstractContextManager[Any]:
        """Leave no room for another chunk meanwhile."""
        raise NotImplementedError

    def clear(self) -> None:
        """Delete all objects."""
        for name in self.objects():
            self.delete(name)


class Folder(Place):
    """A folder, by ``disk://`` or ``file://``."""

    def __init__(self, folder: Path, kind: str = "disk") -> None:
        self.folder, self.kind = folder, kind
        folder.mkdir(exist_ok=True)

    def url(self, options: str = "") -> str:
        return f"{self.kind}://{self.folder}?{options}".rstrip("?")

    def objects(self) -> dict[str, bytes]:
        found = sorted(self.folder.rglob("*.safetensors"))
        aside = self.folder / "quarantine"
        return {str(one): one.read_bytes() for one in found if aside not in one.parents}

    def put(self, name: str, data: bytes) -> None:
        Path(name).write_bytes(data)

    def delete(self, name: str) -> None:
        Path(name).unlink()

    def make_unreadable(self) -> None:
        """Put a link that leads nowhere in the place of each object."""
        for name in self.objects():
            self.delete(name)
            Path(name).symlink_to(name)

    def filled_up(self) -> AbstractContextManager[Any]:
        return _FileSizeLimit()


class _FileSizeLimit:
    """No file of this process grows beyond 8 KiB meanwhile: a disk without room, to its writer."""

    def __enter__(self) -> None:
        self._before = getrlimit(RLIMIT_FSIZE)
        setrlimit(RLIMIT_FSIZE, (8 << 10, self._before[1]))

    def __exit__(self, *_: object) -> None:
        setrlimit(RLIMIT_FSIZE, self._before)


class RedisPlace(Place):
    """Keys of one prefix, on a Redis server behind a proxy."""

    kind = "redis"

    def __init__(self, server: Server, proxy: FaultyProxy) -> None:
        self.server, self.proxy = server, proxy
        self.client = Redis(HOST, server.port)
        self._prefix = uuid.uuid4().hex

    def url(self, options: str = "") -> str:
        assert self.proxy is not None
        return f"redis://{HOST}:{self.proxy.port}/0?prefix={self._prefix}:&{options}".rstrip("&")

    def objects(self) -> dict[str, bytes]:
        names = sorted(name.decode() for name in self.client.scan_iter(f"{self._prefix}:*"))
        values = {name: self.client.get(name) for name in names if self._is_value(name)}
        return {name: data for name, data in values.items() if data is not None}

    def put(self, name: str, data: bytes) -> None:
        self.client.set(name, data, keepttl=True)

    def delete(self, name: str) -> None:
        self.client.delete(name)

    def filled_up(self) -> AbstractContextManager[Any]:
        stack = ExitStack()
        self.client.config_set("maxmemory", 1 << 20)
        stack.callback(self.client.config_set, "maxmemory", 0)
        return stack

    def _is_value(self, name: str) -> bool:
        return self.client.type(name) == b"string" and self.client.strlen(name) >= LEAST_BYTES


class S3Place(Place):
    """Objects of one prefix, in a bucket behind a proxy."""

    kind = "s3"

    def __init__(self, server: Server, proxy: FaultyProxy) -> None:
        self.server, self.proxy = server, proxy
        self._prefix = uuid.uuid4().hex
        self._store = S3Store(
            BUCKET,
            prefix=self._prefix,
            endpoint=server.address,
            client_options={"allow_http": True},
        )

    def url(self, options: str = "") -> str:
        assert self.proxy is not None
        endpoint = f"http://{HOST}:{self.proxy.port}"
        return f"s3://{BUCKET}/{self._prefix}?endpoint={endpoint}&{options}".rstrip("&")

    def objects(self) -> dict[str, bytes]:
        found = sorted(one["path"] for one in self._store.list().collect())
        names = [name for name in found if name.endswith(".safetensors")]
        return {name: bytes(self._store.get(name).bytes()) for name in names if _is_kept(name)}

    def put(self, name: str, data: bytes) -> None:
        self._store.put(name, data, attributes=self._store.get(name).attributes)

    def delete(self, name: str) -> None:
        self._store.delete(name)

    def filled_up(self) -> AbstractContextManager[Any]:
        return nullcontext()


def _is_kept(name: str) -> bool:
    return not name.startswith("quarantine/")


class Servers:
    """A Redis and an S3 endpoint, each behind a proxy, started when a place there is wanted."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._started: dict[str, tuple[Server, FaultyProxy]] = {}

    def place(self, kind: str, folder: Path) -> Place:
        """Return an empty place of a kind: disk, file, redis or s3."""
        if kind in {"disk", "file"}:
            return Folder(folder, kind)
        if kind not in self._started:
            server = self._stack.enter_context(redis_server() if kind == "redis" else s3_server())
            proxy = self._stack.enter_context(FaultyProxy(server.port))
            self._started[kind] = (server, proxy)
        return (RedisPlace if kind == "redis" else S3Place)(*self._started[kind])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
