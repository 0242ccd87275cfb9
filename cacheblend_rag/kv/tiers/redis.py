"""Chunk KV in Redis, shared by all processes that name the same server and prefix.

Layout, after the prefix: ``kv:<key>`` holds a chunk's bytes; the hash ``about`` has its size and
time of writing, the sorted set ``used`` its last use. Redis may evict or expire a value by itself:
a chunk without a value is a miss, whatever the index says, and is then removed from the index.
(``tokens:`` begins what vLLM's connector keeps beside the chunks, see token_stream.py there.)
The index is checked as it is read, see redis_index.py.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from threading import Lock
from typing import Any, ClassVar

from cacheblend_rag.errors import DamagedChunkError, MissingExtraError, StoreError
from cacheblend_rag.kv.chunk_kv import KVKey
from cacheblend_rag.kv.codec import ChunkObject, Parts
from cacheblend_rag.kv.reader import StoredBytes
from cacheblend_rag.kv.stored_chunk import Entry
from cacheblend_rag.kv.tiers.admission import RefusedError, RejectedError, Resident
from cacheblend_rag.kv.tiers.bytes import BytesTier, tensor_of
from cacheblend_rag.kv.tiers.contract import TierPolicy, Usage
from cacheblend_rag.kv.tiers.deadline import BoundedSocket, deadline
from cacheblend_rag.kv.tiers.redis_index import (
    FORGET,
    RECORD,
    TOTAL,
    VALUE_BYTES,
    key_named,
    note_of,
    total_of,
    used_at,
)
from cacheblend_rag.settings.secret import Secret

logger = logging.getLogger(__name__)

PREFIX = "cacheblend:"
TIMEOUT_SECONDS = 5.0
LISTED = 256
"""Index entries read at once."""
ANSWER_BYTES = 1 << 16
"""Most bytes of an answer besides the chunk that it holds."""
INDEX_BYTES = 64 << 20
"""Most bytes of all answers about the index that one operation takes."""
RECOUNT_SECONDS = 600.0
"""Age at which a bounded tier recounts the stored bytes instead of trusting the total."""


class RedisTier(BytesTier):
    """Chunk KV in a Redis server; with a capacity, the least requested are evicted first.

    Several processes may each exceed the capacity by the chunks that they are writing. If the
    server has a limit of its own (maxmemory), it also evicts by its own policy.

    host, port, db, path: of the server, or its socket's path. prefix: of all names on the server
    (see the module's layout). ca_certs: file of the authorities that vouch for its certificate; by
    default the system's.

    Raises MissingExtraError without the library, StoreError without that file; the server is not
    contacted.
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
        self._seconds = seconds = self.policy.timeout_seconds or TIMEOUT_SECONDS
        self.client = connect(
            host=host, port=port, db=db, path=path, tls=tls, ca_certs=ca_certs, user=user,
            password=password, seconds=seconds,
        )  # fmt: skip
        self.prefix = prefix
        self._about, self._used = f"{prefix}about", f"{prefix}used"
        self._one_by_one = Lock()
        self._counted_at = -math.inf
        self._record = self.client.register_script(RECORD)
        self._forget = self.client.register_script(FORGET)

    def entries(self) -> Iterator[tuple[KVKey, Entry]]:
        """Yield the index' entries, removing invalid ones and those whose value is gone."""
        for names in self._indexed():
            yield from self._known_of(names)

    def usage(self) -> Usage:
        """Return the usage by all processes; raises OSError."""
        with self._asking():
            count, total = self._pipeline(
                lambda pipe: (pipe.hlen(self._about), pipe.hget(self._about, TOTAL))
            )
            held = total_of(total)
            if held is None:
                return self._recount()
        return Usage(max(int(count) - 1, 0), held)

    def close(self) -> None:
        """Close the connections."""
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

        with self._asking():
            about, used, *sizes = self._answers(ask, needed=2)
        now = time.time()
        return [_entry(*known, now) for known in zip(about, used, sizes, strict=True)]

    def _read(self, key: KVKey, start: int = 0, end: int | None = None) -> StoredBytes | None:
        # GETRANGE counts from the end below 0, and its own end is within the range.
        value = self._value(key)
        first, last = (start, -1) if end is None else (start, end - 1) if end > start else (1, 0)
        most = VALUE_BYTES if end is None else max(end - start, 0)

        def ask(pipe: Any) -> None:
            pipe.hget(self._about, str(key))
            pipe.strlen(value)
            pipe.getrange(value, first, last)

        with self._asking(most + ANSWER_BYTES):
            about, total, data = self._answers(ask, needed=1)
        note = note_of(about)
        if note is None or total == 0:
            if about is not None and not self.policy.read_only:
                self._drop(key)  # a forged entry, or the server evicted the value
            return None
        if not isinstance(data, bytes) or not isinstance(total, int) or len(data) > most:
            raise DamagedChunkError("is no string of bytes, or longer than requested")
        return StoredBytes(
            tensor_of(data if last >= start or end is None else b""), total, note.written_at
        )

    def _mark_used(self, key: KVKey, written_at: float) -> None:
        with suppress(OSError), self._asking():
            self.client.zadd(self._used, {str(key): time.time()}, xx=True)

    def _write(self, key: KVKey, data: ChunkObject, written_at: float) -> None:
        if data.nbytes > VALUE_BYTES:
            raise RefusedError(
                f"{data.nbytes} bytes: Redis keeps at most {VALUE_BYTES} under a key"
            )
        parts = data.parts()
        # One at a time in a bounded tier: two must not fill the room made for one.
        with (
            nullcontext() if self.capacity_bytes is None else self._one_by_one,
            self._asking(INDEX_BYTES),
            _refusals(),
        ):
            self._make_room(key, data.nbytes)
            self._set(self._value(key), parts, data.nbytes, self._expires(key, written_at))
            # Only now: a chunk in the index may be evicted while a slow writer still writes it.
            about = [str(key), data.nbytes, repr(written_at), repr(time.time())]
            self._record([self._about, self._used], about)

    def _drop(self, key: KVKey) -> bool:
        return bool(self._drop_all([str(key)])[0])

    def _drop_all(self, names: Sequence[str | bytes]) -> list[int]:
        """Remove values and index entries by name; names need not be valid keys."""
        if not names:
            return []
        texts = (n if isinstance(n, str) else n.decode(errors="replace") for n in names)
        values = [self._value(text) for text in texts]

        def ask(pipe: Any) -> None:
            for name, value in zip(names, values, strict=True):
                self._forget([self._about, self._used, value], [name], client=pipe)

        with self._asking():
            return self._pipeline(ask)

    def _value(self, key: KVKey | str) -> str:
        return f"{self.prefix}kv:{key}"

    def _asking(self, most_bytes: int = INDEX_BYTES) -> AbstractContextManager[None]:
        return asking(self._seconds, most_bytes)

    def _pipeline(self, ask: Callable[[Any], object]) -> list[Any]:
        """Send several commands together and return their answers."""
        with self.client.pipeline(transaction=False) as pipe:
            ask(pipe)
            return list(pipe.execute())

    def _answers(self, ask: Callable[[Any], object], *, needed: int) -> list[Any]:
        """As _pipeline, but errors of answers after the first ``needed`` are returned in place.

        Those answers are about values: one invalid value must not affect others.
        """
        with self.client.pipeline(transaction=False) as pipe:
            ask(pipe)
            answers = list(pipe.execute(raise_on_error=False))
        for answer in answers[:needed]:
            if isinstance(answer, Exception):
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

    def _make_room(self, key: KVKey, nbytes: int) -> None:
        """Evict until ``nbytes`` fit in place of ``key``; refuses before evicting in vain."""
        if self.capacity_bytes is None:
            return
        count, total, about = self._pipeline(
            lambda pipe: (
                pipe.hlen(self._about),
                pipe.hget(self._about, TOTAL),
                pipe.hget(self._about, str(key)),
            )
        )
        held, own = Usage(max(int(count) - 1, 0), total_of(total) or 0), note_of(about)
        is_old = time.monotonic() - self._counted_at > RECOUNT_SECONDS
        if total_of(total) is None or held.nbytes > self.capacity_bytes or is_old:
            held = self._recount()
        excess = held.nbytes - (own.nbytes if own else 0) + nbytes - self.capacity_bytes
        if excess > 0 and own is None and self._capacity.would_reject(key):
            raise RejectedError("another chunk requested as often was rejected just now")
        order = self._oldest_first(key)
        victims = self._capacity.evicted_for(key, order, excess=excess, held=held.entries)
        for first in range(0, len(victims), LISTED):
            self._drop_all([str(victim) for victim in victims[first : first + LISTED]])

    def _recount(self) -> Usage:
        """Count stored chunks by their values, and repair the index and its total."""
        with self._asking():
            before = total_of(self.client.hget(self._about, TOTAL))
            sizes: dict[KVKey, int] = {}
            for names in self._indexed():
                sizes.update((key, entry.nbytes) for key, entry in self._known_of(names))
            total = sum(sizes.values())
            if self.policy.read_only:
                return Usage(len(sizes), total)
            if before is None:
                self.client.hset(self._about, TOTAL, total)
            else:  # so that additions of others meanwhile are kept
                self.client.hincrby(self._about, TOTAL, total - before)
        self._counted_at = time.monotonic()
        return Usage(len(sizes), total)

    def _known_of(self, names: Sequence[bytes]) -> list[tuple[KVKey, Entry]]:
        """Return the stored chunks of some names in the index; invalid entries are removed."""
        keys = {name: key for name in names if (key := key_named(name)) is not None}
        entries = dict(zip(keys, self._entry_many(list(keys.values())), strict=True))
        wrong = [name for name in names if entries.get(name) is None]
        if wrong and not self.policy.read_only:
            logger.info("%s tier: %d index entries have no value: removed", self.name, len(wrong))
            self._drop_all(wrong)
        return [(keys[name], entry) for name, entry in entries.items() if entry is not None]

    def _oldest_first(self, key: KVKey) -> Iterator[Resident]:
        start = 0
        while names := self.client.zrange(self._used, start, start + LISTED - 1):
            known = self._known_of(names)
            for other, entry in known:
                if other != key and other not in self._pinned:
                    yield Resident(other, entry.nbytes)
            start += len(known)  # the others are gone

    def _indexed(self) -> Iterator[list[bytes]]:
        """Yield the names in the index, some at a time; raises OSError if it has no end."""
        cursor, named, most = None, 0, 0
        while cursor != 0:
            with self._asking():
                cursor, page = self.client.hscan(self._about, cursor or 0, count=LISTED)
                most = most or 2 * int(self.client.hlen(self._about)) + LISTED
            names = [name for name in page if name != TOTAL.encode()]
            named += len(names)
            if named > most:
                raise OSError("the server lists more index entries than it has")
            yield names


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

    Raises MissingExtraError and StoreError as ``RedisTier``.
    """
    place = {"host": host, "port": port} if path is None else {"unix_socket_path": path}
    return _connect(
        **place, db=db, ssl=tls, ssl_ca_certs=ca_certs, username=user or None,
        password=password.reveal() if password else None,
        socket_timeout=seconds, socket_connect_timeout=seconds,
    )  # fmt: skip


def _connect(**options: Any) -> Any:
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
    if options["ssl_ca_certs"] and not os.path.isfile(options["ssl_ca_certs"]):
        raise StoreError(f"ssl_ca_certs={options['ssl_ca_certs']}: there is no such file")
    is_tls, ca_certs = options.pop("ssl"), options.pop("ssl_ca_certs")
    if is_tls:
        options.update(connection_class=SSLConnection, ssl_ca_certs=ca_certs)
    elif "unix_socket_path" in options:
        options["path"] = options.pop("unix_socket_path")
        del options["socket_connect_timeout"]
        options["connection_class"] = UnixDomainSocketConnection
    # One try: there are other tiers, and a failed one is skipped for a while.
    options["connection_class"] = _bounded(options.get("connection_class", Connection))
    return Redis(connection_pool=ConnectionPool(**options, retry=Retry(NoBackoff(), 0)))


def _bounded(connection_class: Any) -> Any:
    """Return a connection class whose sockets enforce the deadline of an operation."""

    class Bounded(connection_class):  # type: ignore[misc]
        def _connect(self) -> BoundedSocket:
            return BoundedSocket(super()._connect())

    return Bounded


@contextmanager
def _refusals() -> Iterator[None]:
    """Turn the server's out-of-memory error into a RefusedError: reads still work."""
    from redis.exceptions import OutOfMemoryError

    try:
        yield
    except OutOfMemoryError as error:
        raise RefusedError(f"the server has no memory left: {error}") from error


def _entry(about: Any, score: Any, nbytes: Any, now: float) -> Entry | None:
    """Return the entry of a chunk with an index entry and a value."""
    note = note_of(about)
    if note is None or not isinstance(nbytes, int) or not 0 < nbytes <= VALUE_BYTES:
        return None
    return Entry(nbytes, note.written_at, used_at(score, note.written_at, now))
