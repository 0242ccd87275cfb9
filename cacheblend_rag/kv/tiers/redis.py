"""Chunk KV in Redis, shared by all processes that name the same server and prefix.

Layout, behind the prefix: ``kv:<key>`` holds a chunk's bytes; the hash ``about`` has its size and
when it was written, the sorted set ``used`` when it was used last. Redis may evict or expire a
value by itself: what has no value is a miss, whatever the index says, and leaves the index then.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from threading import Lock
from typing import Any, ClassVar

from cacheblend_rag.errors import MissingExtraError, StoreError
from cacheblend_rag.kv.chunk_kv import KVKey
from cacheblend_rag.kv.codec import Encoding, Parts
from cacheblend_rag.kv.reader import StoredBytes
from cacheblend_rag.kv.tiers.admission import RefusedError, RejectedError, Resident
from cacheblend_rag.kv.tiers.base import Entry, Usage
from cacheblend_rag.kv.tiers.bytes import BytesTier, tensor_of
from cacheblend_rag.kv.tiers.policy import TierPolicy
from cacheblend_rag.secret import Secret

PREFIX = "cacheblend:"
TIMEOUT_SECONDS = 5.0
VALUE_BYTES = 512 << 20
"""More than which Redis keeps under no key."""
LISTED = 256
"""Index entries asked for at once."""

_TOTAL = ""
"""The field of ``about`` that holds the bytes of all chunks."""
_RECORD = """
local old = redis.call('HGET', KEYS[1], ARGV[1])
local bytes = tonumber(ARGV[2])
if old then bytes = bytes - tonumber(string.match(old, '%d+')) end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[2] .. ' ' .. ARGV[3])
redis.call('HINCRBY', KEYS[1], '', bytes)
redis.call('ZADD', KEYS[2], ARGV[4], ARGV[1])
"""
# Where memory is full, a script may not begin with what could take more.
_FORGET = """
local old = redis.call('HGET', KEYS[1], ARGV[1])
if old then
  redis.call('HDEL', KEYS[1], ARGV[1])
  redis.call('ZREM', KEYS[2], ARGV[1])
  redis.call('HINCRBY', KEYS[1], '', -tonumber(string.match(old, '%d+')))
end
return redis.call('UNLINK', KEYS[3])
"""


class RedisTier(BytesTier):
    """Chunk KV in a Redis server; what is asked for least goes first, where there is a capacity.

    Several processes may each pass the capacity by the chunks that they are writing at the time.
    Where the server has a limit of its own (maxmemory), it evicts by its own policy, too.

    host, port, db, path: of the server, or its socket's path. prefix: of all keys here. ca_certs:
    file of the authorities that vouch for its certificate; by default the system's.

    Raises MissingExtraError without the library, StoreError without that file; the server is not
    asked.
    """

    entries_at_once: ClassVar[int] = 1
    fails_whole: ClassVar[bool] = True

    def __init__(
        self,
        capacity_bytes: int | None = None,
        *,
        host: str = "localhost",
        port: int = 6379,
        db: int = 0,
        path: str | None = None,
        tls: bool = False,
        ca_certs: str | None = None,
        user: str | None = None,
        password: Secret | None = None,
        prefix: str = PREFIX,
        name: str = "redis",
        policy: TierPolicy | None = None,
    ) -> None:
        super().__init__(name, capacity_bytes, policy=policy)
        seconds = self.policy.timeout_seconds or TIMEOUT_SECONDS
        place = {"host": host, "port": port} if path is None else {"unix_socket_path": path}
        self.client = _connect(
            **place, db=db, ssl=tls, ssl_ca_certs=ca_certs, username=user or None,
            password=password.reveal() if password else None,
            socket_timeout=seconds, socket_connect_timeout=seconds,
        )  # fmt: skip
        self._prefix = prefix
        self._about, self._used = f"{prefix}about", f"{prefix}used"
        self._one_by_one = Lock()
        self._record = self.client.register_script(_RECORD)
        self._forget = self.client.register_script(_FORGET)

    def entries(self) -> Iterator[tuple[KVKey, Entry]]:
        """Go through the index, forgetting what the server let go of."""
        for keys in self._indexed():
            for key, entry in zip(keys, self._entry_many(keys), strict=True):
                if entry is not None:
                    yield key, entry
                else:
                    self._drop(key)

    def usage(self) -> Usage:
        """Return what all processes stored; raises OSError."""
        with _failures():
            count, total = self._pipeline(
                lambda pipe: (pipe.hlen(self._about), pipe.hget(self._about, _TOTAL))
            )
        return Usage(max(int(count) - 1, 0), max(int(total or 0), 0))

    def close(self) -> None:
        """Let go of connections."""
        self.client.close()

    def _entry(self, key: KVKey) -> Entry | None:
        return self._entry_many([key])[0]

    def _entry_many(self, keys: Sequence[KVKey]) -> list[Entry | None]:
        if not keys:
            return []
        fields = [str(key) for key in keys]

        def ask(pipe: Any) -> None:
            pipe.hmget(self._about, fields)
            pipe.zmscore(self._used, fields)
            for key in keys:
                pipe.strlen(self._value(key))

        with _failures():
            about, used, *sizes = self._pipeline(ask)
        return [_entry(*known) for known in zip(about, used, sizes, strict=True)]

    def _read(self, key: KVKey, start: int = 0, end: int | None = None) -> StoredBytes | None:
        # GETRANGE counts from the end below 0, and its own end is within the range.
        value = self._value(key)
        first, last = (start, -1) if end is None else (start, end - 1) if end > start else (1, 0)

        def ask(pipe: Any) -> None:
            pipe.hget(self._about, str(key))
            pipe.strlen(value)
            pipe.getrange(value, first, last)

        with _failures():
            note, total, data = self._pipeline(ask)
        if not note:
            return None
        if not total:
            self._drop(key)  # the server let go of it
            return None
        return StoredBytes(
            tensor_of(data if last >= start or end is None else b""), total, _written(note)
        )

    def _mark_used(self, key: KVKey, found: StoredBytes) -> None:
        with suppress(OSError), _failures():
            self.client.zadd(self._used, {str(key): time.time()}, xx=True)

    def _write(self, key: KVKey, data: Encoding, written_at: float) -> None:
        if data.nbytes > VALUE_BYTES:
            raise RefusedError(
                f"{data.nbytes} bytes: Redis keeps at most {VALUE_BYTES} under a key"
            )
        parts = data.parts()
        # One after the other in a bounded tier: two must not fill the room made for one.
        with (
            _failures(),
            _refusals(),
            nullcontext() if self.capacity_bytes is None else self._one_by_one,
        ):
            self._make_room(key, data.nbytes)
            self._set(self._value(key), parts, data.nbytes, self._expires(written_at))
            # Only now: what the index names may be evicted, and then written by whoever was slow.
            about = [str(key), data.nbytes, repr(written_at), repr(time.time())]
            self._record([self._about, self._used], about)

    def _drop(self, key: KVKey) -> bool:
        with _failures():
            return bool(self._forget([self._about, self._used, self._value(key)], [str(key)]))

    def _value(self, key: KVKey) -> str:
        return f"{self._prefix}kv:{key}"

    def _pipeline(self, ask: Callable[[Any], object]) -> list[Any]:
        """Return the answers to several questions that are sent together."""
        with self.client.pipeline(transaction=False) as pipe:
            ask(pipe)
            return list(pipe.execute())

    def _expires(self, written_at: float) -> list[str]:
        """Return how a SET says when the value is gone, for a tier of its own time to live."""
        ttl_seconds = self.policy.ttl_seconds
        return [] if ttl_seconds is None else ["PXAT", str(int((written_at + ttl_seconds) * 1000))]

    def _set(self, name: str, parts: Parts, nbytes: int, options: Sequence[str]) -> None:
        """Send a value as it lies in memory: joining its parts would cost as much as sending it."""
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
            connection.disconnect()  # whatever is still under way belongs to nobody
            raise
        finally:
            pool.release(connection)

    def _make_room(self, key: KVKey, nbytes: int) -> None:
        """Evict until ``nbytes`` fit in place of ``key``; refuses before evicting in vain."""
        if self.capacity_bytes is None:
            return
        count, total, own = self._pipeline(
            lambda pipe: (
                pipe.hlen(self._about),
                pipe.hget(self._about, _TOTAL),
                pipe.hget(self._about, str(key)),
            )
        )
        excess = int(total or 0) - _size(own) + nbytes - self.capacity_bytes
        if excess > 0 and not own and self._admission.would_reject(key):
            raise RejectedError("another chunk seen as often was turned away just now")
        order = self._oldest_first(key)
        for victim in self._let_go(key, order, excess=excess, held=max(int(count) - 1, 0)):
            self._drop(victim)

    def _oldest_first(self, key: KVKey) -> Iterator[Resident]:
        start = 0
        while names := self.client.zrange(self._used, start, start + LISTED - 1):
            sizes = self.client.hmget(self._about, names)
            for name, note in zip(names, sizes, strict=True):
                other = _key(name)
                if other is not None and other != key and other not in self._pinned:
                    yield Resident(other, _size(note))
            start += LISTED

    def _indexed(self) -> Iterator[list[KVKey]]:
        """Go through the keys in the index, some at a time."""
        cursor = None
        while cursor != 0:
            with _failures():
                cursor, page = self.client.hscan(self._about, cursor or 0, count=LISTED)
            yield [key for name in page if (key := _key(name)) is not None]


def _connect(**options: Any) -> Any:
    try:
        from redis import ConnectionPool, Redis, SSLConnection, UnixDomainSocketConnection
        from redis.backoff import NoBackoff
        from redis.retry import Retry
    except ImportError as error:
        raise MissingExtraError("the Redis tier", "redis") from error
    if options["ssl_ca_certs"] and not os.path.isfile(options["ssl_ca_certs"]):
        raise StoreError(f"ssl_ca_certs={options['ssl_ca_certs']}: there is no such file")
    is_tls, ca_certs = options.pop("ssl"), options.pop("ssl_ca_certs")
    if is_tls:
        options.update(connection_class=SSLConnection, ssl_ca_certs=ca_certs)
    elif "unix_socket_path" in options:
        options["path"] = options.pop("unix_socket_path")
        del options["socket_connect_timeout"]
        options["connection_class"] = UnixDomainSocketConnection
    # One try: whoever asks has other tiers, and a failed one is left alone for a while.
    return Redis(connection_pool=ConnectionPool(**options, retry=Retry(NoBackoff(), 0)))


@contextmanager
def _failures() -> Iterator[None]:
    """Raise what Redis says as OSError."""
    from redis.exceptions import RedisError

    try:
        yield
    except RedisError as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


@contextmanager
def _refusals() -> Iterator[None]:
    """Raise that the server's memory is full as RefusedError: it can be read as before."""
    from redis.exceptions import OutOfMemoryError

    try:
        yield
    except OutOfMemoryError as error:
        raise RefusedError(f"the server has no memory left: {error}") from error


def _entry(note: bytes | None, used_at: float | None, nbytes: int) -> Entry | None:
    """Return what is known of a chunk of which index and value are both there."""
    if not note or not nbytes:
        return None
    return Entry(nbytes, _written(note), _written(note) if used_at is None else float(used_at))


def _written(note: bytes) -> float:
    return float(note.split()[1])


def _size(note: bytes | None) -> int:
    return int(note.split()[0]) if note else 0


def _key(name: bytes) -> KVKey | None:
    return KVKey.parsed(name.decode(errors="replace"))
