"""Chunk KV in Redis, shared by all processes that name the same server and prefix.

``kv:<key>`` after the prefix holds a chunk: the time at which it was first stored, as a double of 8
bytes, and its object. Redis expires it and may evict it by its own policy: what is gone is a miss.
Its last use is the server's to know.
(``tokens/`` begins what engines/catalog_places.py keeps beside the chunks.)
"""

from __future__ import annotations

import math
import os
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, ClassVar

from cacheblend_rag.errors import DamagedChunkError, MissingExtraError, StoreError
from cacheblend_rag.kv.chunk_kv import KVKey
from cacheblend_rag.kv.codec import ChunkObject, Parts
from cacheblend_rag.kv.reader import StoredBytes
from cacheblend_rag.kv.stored_chunk import Entry
from cacheblend_rag.kv.tiers.admission import RefusedError
from cacheblend_rag.kv.tiers.bytes import BytesTier, tensor_of
from cacheblend_rag.kv.tiers.deadline import BoundedSocket, deadline
from cacheblend_rag.kv.tiers.policy import TierPolicy
from cacheblend_rag.settings.base import Secret

PREFIX = "cacheblend:"
TIMEOUT_SECONDS = 5.0
LISTED = 256
"""Names listed at once."""
ANSWER_BYTES = 1 << 20
"""Most bytes of an answer besides the chunk that it holds."""
VALUE_BYTES = 512 << 20
"""Redis' limit on the size of a value."""
TIME = struct.Struct("<d")


class RedisTier(BytesTier):
    """Chunk KV in a Redis server, which has a limit of its own, maxmemory.

    prefix: of all names on the server (see the module's layout). place: of the server, as
    ``connect`` takes it; raises as that.
    """

    fails_whole: ClassVar[bool] = True

    def __init__(
        self,
        *,
        prefix: str = PREFIX,
        name: str = "redis",
        policy: TierPolicy | None = None,
        **place: Any,
    ) -> None:
        super().__init__(name, policy=policy)
        self._seconds = self.policy.timeout_seconds or TIMEOUT_SECONDS
        self.client = connect(**place, seconds=self._seconds)
        self.prefix = prefix

    def entries(self) -> Iterator[tuple[KVKey, Entry]]:
        """Yield all chunks, some more than once; raises OSError if the listing has no end."""
        start = self._value("")
        pattern = re.sub(r"([*?\[\]\\])", r"\\\1", start) + "*"
        cursor, named, most = None, 0, 0
        while cursor != 0:
            with self._asking():
                cursor, names = self.client.scan(cursor or 0, match=pattern, count=LISTED)
                most = most or 2 * int(self.client.dbsize()) + LISTED
            named += len(names)
            if named > most:
                raise OSError("the server lists more names than it has")
            told = [name.decode(errors="replace") for name in names if isinstance(name, bytes)]
            found_keys = (KVKey.parsed(text.removeprefix(start)) for text in told)
            keys = [key for key in found_keys if key is not None]
            found = zip(keys, self._entries(keys) if keys else (), strict=True)
            yield from ((key, entry) for key, entry in found if entry is not None)

    def close(self) -> None:
        """Close the connections."""
        self.client.close()

    def entry_many(self, keys: Sequence[KVKey]) -> list[Entry | None]:
        """As for any tier, in one request."""
        if not keys:
            return []
        with suppress(OSError), self.guard.reads("look up %s", keys[0]):
            return self._entries(keys)
        return [None] * len(keys)

    def _entry(self, key: KVKey) -> Entry | None:
        return self._entries([key])[0]

    def _entries(self, keys: Sequence[KVKey]) -> list[Entry | None]:
        def ask(pipe: Any) -> None:
            for key in keys:
                pipe.getrange(self._value(key), 0, TIME.size - 1)
                pipe.strlen(self._value(key))

        with self._asking(ANSWER_BYTES + 64 * len(keys)):
            answers = self._answers(ask)
        return [_entry(*told) for told in zip(answers[::2], answers[1::2], strict=True)]

    def _read(self, key: KVKey, start: int, end: int) -> StoredBytes | None:
        value = self._value(key)

        def ask(pipe: Any) -> None:
            pipe.getrange(value, 0, TIME.size - 1)  # which includes its end
            pipe.strlen(value)
            pipe.getrange(value, TIME.size + start, TIME.size + end - 1)

        with self._asking(end - start + ANSWER_BYTES):
            time, total, data = self._answers(ask)
        if total == 0:
            return None
        entry = _entry(time, total)
        if entry is None or not isinstance(data, bytes) or len(data) > end - start:
            raise DamagedChunkError("is no string of bytes, has no time, or is longer than asked")
        return StoredBytes(tensor_of(data), entry.nbytes, entry.written_at)

    def _write(self, key: KVKey, data: ChunkObject, written_at: float) -> None:
        from redis.exceptions import OutOfMemoryError

        nbytes = TIME.size + data.nbytes
        if nbytes > VALUE_BYTES:
            raise RefusedError(f"{nbytes} bytes: Redis keeps at most {VALUE_BYTES} under a key")
        parts = [TIME.pack(written_at), *data.parts()]
        try:
            with self._asking():
                self._set(self._value(key), parts, nbytes, self._expires(key, written_at))
        except OSError as error:
            if isinstance(error.__cause__, OutOfMemoryError):  # reads still work
                raise RefusedError(f"the server has no memory left: {error.__cause__}") from error
            raise

    def _drop(self, key: KVKey) -> bool:
        with self._asking():
            return bool(self.client.unlink(self._value(key)))

    def _value(self, key: KVKey | str) -> str:
        return f"{self.prefix}kv:{key}"

    def _asking(self, most_bytes: int = ANSWER_BYTES) -> AbstractContextManager[None]:
        return asking(self._seconds, most_bytes)

    def _answers(self, ask: Callable[[Any], object]) -> list[Any]:
        """Send several commands together and return their answers.

        That a value is of another kind is returned in place: it must not affect others.
        """
        with self.client.pipeline(transaction=False) as pipe:
            ask(pipe)
            answers = list(pipe.execute(raise_on_error=False))
        for answer in answers:
            if isinstance(answer, Exception) and not str(answer).startswith("WRONGTYPE"):
                raise answer
        return answers

    def _expires(self, key: KVKey, written_at: float) -> list[str]:
        """Return the arguments of SET for the time to live, if there is one."""
        if self.ttl_seconds is None or self.is_pinned(key):
            return []
        ends = written_at + self.ttl_seconds
        return ["PXAT", str(max(int(ends * 1000), 1))] if math.isfinite(ends) else []

    def _set(self, name: str, parts: Parts, nbytes: int, options: Sequence[str]) -> None:
        """Send a value in its parts: joining them would cost as much as sending it."""
        words = [b"SET", name.encode(), *(option.encode() for option in options)]
        before = b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words[:2])
        after = b"".join(b"\r\n$%d\r\n%s" % (len(word), word) for word in words[2:])
        head = b"*%d\r\n%s$%d\r\n" % (len(words) + 1, before, nbytes)
        pool = self.client.connection_pool
        connection = pool.get_connection()
        try:
            connection.send_packed_command([head, *parts, after + b"\r\n"])
            connection.read_response()
        except BaseException:
            connection.disconnect()  # later answers would belong to no request
            raise
        finally:
            pool.release(connection)


@contextmanager
def asking(seconds: float, most_bytes: int) -> Iterator[None]:
    """Run one operation, of any number of commands, within a time and so many bytes of answers.

    Raises Redis' errors as OSError.
    """
    from redis.exceptions import RedisError

    try:
        with deadline(seconds, most_bytes):
            yield
    except RedisError as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


def connect(
    *,
    host: str = "localhost",
    port: int = 6379,
    db: int = 0,
    path: str | None = None,
    tls: bool = False,
    ca_certs: str | None = None,
    user: str | None = None,
    password: Secret | None = None,
    seconds: float = TIMEOUT_SECONDS,
) -> Any:
    """Return a client whose operations are bounded by ``asking``; the server is not contacted.

    host, port, db, path: of the server, or its socket's path. ca_certs: file of the authorities
    that vouch for its certificate; by default the system's.

    Raises MissingExtraError without the library, StoreError without that file.
    """
    try:
        from redis import (
            Connection,
            ConnectionPool,
            Redis,
            SSLConnection,
            UnixDomainSocketConnection,
        )
        from redis.backoff import NoBackoff
        from redis.retry import Retry
    except ImportError as error:
        raise MissingExtraError("the Redis tier", "redis") from error
    if ca_certs and not os.path.isfile(ca_certs):
        raise StoreError(f"ssl_ca_certs={ca_certs}: there is no such file")
    kind: Any = Connection
    place: dict[str, Any] = {"host": host, "port": port, "socket_connect_timeout": seconds}
    if path is not None:
        kind, place = UnixDomainSocketConnection, {"path": path}
    elif tls:
        kind, place = SSLConnection, {**place, "ssl_ca_certs": ca_certs}

    class Bounded(kind):  # type: ignore[misc]
        """Its sockets enforce the deadline of an operation."""

        def _connect(self) -> BoundedSocket:
            return BoundedSocket(super()._connect())

    pool = ConnectionPool(
        connection_class=Bounded, **place, db=db, username=user or None,
        password=password.get_secret_value() if password else None, socket_timeout=seconds,
        retry=Retry(NoBackoff(), 0),  # one try: a failed tier is skipped for a while
        protocol=2,  # with 3, leftover bytes in a pooled connection answer the next command
    )  # fmt: skip
    return Redis.from_pool(pool)


def _entry(time: Any, nbytes: Any) -> Entry | None:
    """Return the entry of a value with a possible time; anyone may have written it."""
    if not isinstance(time, bytes) or len(time) != TIME.size:
        return None
    if not isinstance(nbytes, int) or not TIME.size < nbytes <= VALUE_BYTES:
        return None
    (written_at,) = TIME.unpack(time)
    is_time = math.isfinite(written_at) and written_at >= 0
    return Entry(nbytes - TIME.size, written_at, written_at) if is_time else None
