"""What every tier does alike: counting, pins, turning failures into misses."""

from __future__ import annotations

import errno
import logging
import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Thread
from typing import ClassVar, TypeVar

from cacheblend_rag.errors import (
    DamagedChunkError,
    ForeignChunkError,
    StoreError,
    UnsealedChunkError,
)
from cacheblend_rag.kv.chunk_kv import KVKey, NotFiniteError
from cacheblend_rag.kv.mac import CHECKSUM
from cacheblend_rag.kv.packed_kv import LayerKV, StoredKV
from cacheblend_rag.kv.put_result import PutResult, told
from cacheblend_rag.kv.reader import ChunkReader, WholeReader
from cacheblend_rag.kv.shared_chunk import PARTS_AT_ONCE
from cacheblend_rag.kv.tiers.admission import Admission, RefusedError, RejectedError, Resident
from cacheblend_rag.kv.tiers.breaker import Breaker, OutError
from cacheblend_rag.kv.tiers.policy import TierPolicy
from cacheblend_rag.kv.write_queue import WriteQueue
from cacheblend_rag.memory import lack_of_memory

logger = logging.getLogger(__name__)

T = TypeVar("T")

COUNTED = (
    "hits", "misses", "admitted", "rejected", "refused", "evictions", "expired", "quarantined",
    "errors", "skipped", "dropped", "queued",
)  # fmt: skip
"""skipped: reads that a tier was not asked for while it was out. dropped: writes it missed so, or
that found no room in its queue. queued: chunks that wait to be written."""
SLOW_FAILURE_SECONDS = 0.25
"""A failure that takes less costs a request next to nothing, and may be about one chunk alone."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What a tier knows of a stored chunk without reading it; times are Unix seconds."""

    nbytes: int
    written_at: float
    used_at: float


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A chunk KV and when it was first written, which moving it between tiers does not change.

    check: looks at the numbers, or does nothing where that was done, as when they were read. A tier
    calls it before anyone can find the chunk there; whoever writes may do so beside it.
    """

    kv: StoredKV
    written_at: float
    check: Callable[[], None] = lambda: None


Read = StoredChunk | StoreError | None
"""What reading one of several chunks came to: there, unusable or out of reach, absent."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What a tier holds now."""

    entries: int
    nbytes: int


class Tier(ABC):
    """One place where chunk KV is kept.

    A new tier implements the abstract methods: ``_entry``, ``_load``, ``_save`` and ``_drop`` may
    raise OSError, which the public methods turn into a miss or a failed put. All are called from
    several threads at once. Where one question about many chunks costs less than many questions,
    it overrides ``_entry_many`` and ``_load_many``, too.

    name: shown in reports and stats. policy: how it is used. ttl_seconds: age at which copies are
    gone, the policy's or that of the store which the tier is in, the lower one. durable: whether
    chunks outlive this process, so that ``check`` has bytes to check. entries_at_once,
    reads_at_once: threads that look up and read many chunks; 1 where a thread costs more than it
    saves. parts_at_once: see SharedChunk's at_once. fails_whole: whether any failure is one of the
    tier as a whole (a network's), not of one chunk or of writing alone (a disk's). keeps_found:
    whether a chunk found in a slower tier is kept here, too. takes_puts: whether what is put into
    the store is stored here.

    A tier that fails as a whole, or takes long to fail, is out: it is not asked, so that no request
    waits for it, until a trial succeeds. Reading and writing are out by themselves where a tier
    does not fail as a whole.
    """

    name: str
    durable: ClassVar[bool] = True
    entries_at_once: ClassVar[int] = 8
    reads_at_once: ClassVar[int] = 8
    parts_at_once: ClassVar[int] = PARTS_AT_ONCE
    fails_whole: ClassVar[bool] = False
    keeps_found: bool = True
    takes_puts: bool = True

    def __init__(
        self, name: str, capacity_bytes: int | None = None, *, policy: TierPolicy | None = None
    ) -> None:
        self.name = name
        self.policy = TierPolicy.of(capacity_bytes, policy)
        self.capacity_bytes = self.policy.capacity_bytes
        writable = not self.policy.read_only
        self.keeps_found = type(self).keeps_found and self.policy.promote and writable
        self.takes_puts = type(self).takes_puts and self.policy.write != "none" and writable
        self.seal = CHECKSUM
        self.ttl_seconds = self.policy.ttl_seconds
        self.reading = Breaker()
        self.writing = self.reading if self.fails_whole else Breaker()
        self._queue = WriteQueue(self._put, name) if self.policy.write == "behind" else None
        self._admission = Admission(self.policy)
        self._pinned: set[KVKey] = set()
        self._counts: Counter[str] = Counter()
        self._counts_lock = threading.Lock()
        self._last_failure = ""
        self._warned_reading, self._warned_writing = set[str](), set[str]()

    @abstractmethod
    def _entry(self, key: KVKey) -> Entry | None:
        """Look a chunk up without reading it; None when absent. Raises OSError."""

    @abstractmethod
    def entries(self) -> Iterator[tuple[KVKey, Entry]]:
        """Go through all stored chunks, in no given order; never on a request's way."""

    def some_entries(self) -> Iterable[tuple[KVKey, Entry]]:
        """Return some of the stored chunks, others each time, to be looked at for their age.

        None where that takes a network: its servers let go of what is past its time, or it is
        removed when it is found.
        """
        return ()

    @abstractmethod
    def usage(self) -> Usage:
        """Count what is stored."""

    @abstractmethod
    def _load(self, key: KVKey) -> StoredChunk | None:
        """Read a chunk and mark it used; raises DamagedChunkError, ForeignChunkError, OSError."""

    @abstractmethod
    def _save(self, key: KVKey, chunk: StoredChunk) -> None:
        """Store or replace a chunk, evicting others.

        Raises RefusedError, OSError, and what its check raises.
        """

    @abstractmethod
    def _drop(self, key: KVKey) -> bool:
        """Remove a chunk; returns whether it was there. Raises OSError."""

    def quarantine(self, key: KVKey, reason: str) -> None:
        """Take an unusable chunk out of sight, and count it; what is read only stays as it is."""
        if self.policy.read_only:
            logger.warning("%s tier: %s cannot be used: %s", self.name, key, reason)
            return
        logger.warning("%s tier: %s set aside: %s", self.name, key, reason)
        self._count("quarantined")
        try:
            with self._accessing(self.writing, key):
                self._set_aside(key, reason)
        except OSError as error:
            self._could_not("set %s aside", key, error)

    def _set_aside(self, key: KVKey, reason: str) -> None:
        """Keep the bytes for inspection where that is possible; here they are dropped."""
        self._drop(key)

    def check(self, key: KVKey) -> str | None:
        """Read a stored chunk through; returns what is wrong with it, None when sound or gone."""
        return None

    def has_relative(self, key: KVKey) -> bool:
        """Whether the same chunk is stored for another model or lead-in of the same namespace.

        Asked at each miss, so a tier that cannot tell without listing what it holds says no.
        """
        return False

    def contains(self, key: KVKey) -> bool:
        """Whether a chunk is stored here."""
        return self.entry(key) is not None

    def entry(self, key: KVKey) -> Entry | None:
        """Look a chunk up without reading it or counting as its use.

        Returns None when it is absent or the tier cannot be read.
        """
        return self.entry_many([key])[0]

    def entry_many(self, keys: Sequence[KVKey]) -> list[Entry | None]:
        """As entry, for many chunks, in their order."""
        queued = {key: _entry_of(chunk) for key, chunk in self._not_written(keys).items()}
        rest = [key for key in keys if key not in queued]
        stored = iter(self._stored_entries(rest) if rest else ())
        return [queued[key] if key in queued else next(stored) for key in keys]

    def _stored_entries(self, keys: Sequence[KVKey]) -> list[Entry | None]:
        try:
            with self._accessing(self.reading, keys[0], timed=False):
                return self._entry_many(keys)
        except OSError as error:
            self._could_not("look up %s", keys[0], error, skipped="skipped")
            return [None] * len(keys)

    def queued(self) -> list[tuple[KVKey, Entry]]:
        """Return the chunks that are not written yet; to be asked for before ``entries``."""
        keys = [] if self._queue is None else self._queue.keys()
        return [(key, _entry_of(chunk)) for key, chunk in self._not_written(keys).items()]

    def _not_written(self, keys: Sequence[KVKey]) -> dict[KVKey, StoredChunk]:
        if self._queue is None:
            return {}
        found = {key: self._queue.get(key) for key in keys}
        return {key: chunk for key, chunk in found.items() if chunk is not None}

    def _entry_many(self, keys: Sequence[KVKey]) -> list[Entry | None]:
        """As ``_entry``, for many chunks, in their order. Raises OSError."""
        return _side_by_side(self._entry_or_none, keys, self.entries_at_once)

    def _entry_or_none(self, key: KVKey) -> Entry | None:
        try:
            with self._accessing(self.reading, key):
                return self._entry(key)
        except OSError as error:
            self._could_not("look up %s", key, error, skipped="skipped")
            return None

    def get(self, key: KVKey) -> StoredChunk | None:
        """Read a chunk; None when absent.

        Raises DamagedChunkError or ForeignChunkError once it is quarantined, StoreError when the
        tier cannot be read.
        """
        (read,) = self.get_many([key])
        if isinstance(read, StoreError):
            raise read
        return read

    def get_many(self, keys: Sequence[KVKey]) -> list[Read]:
        """As get, for many chunks, in their order; an error stands in its chunk's place."""
        queued = self._not_written(keys)
        self._count("hits", len(queued))
        rest = [key for key in keys if key not in queued]
        stored = iter(self._get_stored(rest) if rest else ())
        return [queued[key] if key in queued else next(stored) for key in keys]

    def _get_stored(self, keys: Sequence[KVKey]) -> list[Read]:
        loaded: list[Read | OSError]
        try:
            with self._accessing(self.reading, keys[0], timed=False) as permit:
                loaded = self._load_many(keys)
                if self.fails_whole and any(isinstance(one, OSError) for one in loaded):
                    self.reading.failed(permit)
        except OSError as error:
            loaded = [error] * len(keys)
        return [self._settled(key, found) for key, found in zip(keys, loaded, strict=True)]

    def open(self, key: KVKey) -> ChunkReader | StoreError | None:
        """As get, but for the chunk's layers, which ``read_layers`` reads; an error is returned."""
        opened: ChunkReader | StoreError | OSError | None
        if queued := self._not_written([key]):
            opened = WholeReader(queued[key].kv, queued[key].written_at)
        else:
            opened = self._opened(key)
        self._count("hits" if isinstance(opened, ChunkReader) else "misses")
        return opened if isinstance(opened, ChunkReader) else self._failed(key, opened)

    def _opened(self, key: KVKey) -> ChunkReader | StoreError | OSError | None:
        try:
            with self._accessing(self.reading, key):
                return self._open(key)
        except (StoreError, OSError) as error:
            return error

    def _open(self, key: KVKey) -> ChunkReader | None:
        """Open a chunk and mark it used; raises as ``_load``, which is asked for all of it here."""
        found = self._load(key)
        return None if found is None else WholeReader(found.kv, found.written_at)

    def read_layers(
        self, key: KVKey, reader: ChunkReader, first: int, last: int
    ) -> Sequence[LayerKV]:
        """Read layers ``first`` to ``last - 1`` of a chunk that was opened here; raises as get."""
        try:
            with self._accessing(self.reading, key):
                return reader.read(first, last)
        except (StoreError, OSError) as error:
            failed = self._failed(key, error)
            raise failed or error from error

    def _load_many(self, keys: Sequence[KVKey]) -> list[Read | OSError]:
        """As ``_load``, for many chunks, in their order; an error stands in its chunk's place."""
        return _side_by_side(self._loaded, keys, self.reads_at_once)

    def _loaded(self, key: KVKey) -> Read | OSError:
        try:
            with self._accessing(self.reading, key):
                return self._load(key)
        except (StoreError, OSError) as error:
            return error

    def _settled(self, key: KVKey, found: Read | OSError) -> Read:
        """Count what reading a chunk came to, and take one that is unusable out of sight."""
        self._count("hits" if isinstance(found, StoredChunk) else "misses")
        return found if isinstance(found, StoredChunk) else self._failed(key, found)

    def _failed(self, key: KVKey, found: StoreError | OSError | None) -> StoreError | None:
        """Take a chunk that is unusable out of sight; returns what to say of one, if there is."""
        if isinstance(found, UnsealedChunkError) and not self.seal.by_key:
            # It is sound to those who have the key, and theirs to remove.
            logger.warning("%s tier: %s is not read: %s", self.name, key, found)
        elif isinstance(found, DamagedChunkError | ForeignChunkError):
            self.quarantine(key, str(found))
        if not isinstance(found, OSError):
            return found
        self._could_not("read %s", key, found, skipped="skipped")
        unread = StoreError(f"{self.name} tier: could not read {key}: {found}")
        unread.__cause__ = found
        return unread

    def see(self, keys: Iterable[KVKey]) -> None:
        """Count chunks as asked for, wherever they are: what is seen often is kept."""
        self._admission.see(keys)

    def would_take(self, key: KVKey, nbytes: int) -> bool:
        """Whether a chunk of so many bytes would be stored, as far as can be told at once."""
        return True

    def put(self, key: KVKey, chunk: StoredChunk) -> PutResult:
        """Store or replace a chunk; returns, and logs, why when the tier did not take it.

        Where the tier is written behind, it is stored soon, and found already. Raises
        NotFiniteError when the tier had a look at the chunk's numbers.
        """
        if self.policy.read_only:
            return PutResult(False)
        if self._queue is None:
            return self._put(key, chunk)
        chunk.check()
        refusal = self._queue.add(key, chunk)
        if refusal is None:
            return PutResult(True)
        self._count("dropped")
        logger.warning("%s tier: %s is not stored: %s", self.name, key, refusal)
        return PutResult(False, f"{self.name} tier: {refusal}")

    def _put(self, key: KVKey, chunk: StoredChunk) -> PutResult:
        try:
            with self._accessing(self.writing, key):
                self._save(key, chunk)
        except RejectedError as rejection:
            self._count("rejected")
            logger.debug("%s tier rejected %s: %s", self.name, key, rejection)
            return PutResult(False)
        except RefusedError as refusal:
            # One warning a tier: a capacity below one chunk would otherwise fill the log.
            first = self._count("refused") == 1
            level = logging.WARNING if first else logging.DEBUG
            logger.log(level, "%s tier refused %s: %s", self.name, key, refusal)
            return PutResult(False)
        except OSError as error:
            self._could_not("store %s", key, error)
            cause = self._last_failure if isinstance(error, OutError) else told(error)
            return PutResult(False, f"{self.name} tier: {cause}")
        return PutResult(True)

    def evict(self, key: KVKey) -> bool:
        """Remove a chunk, pinned or not; returns whether it was there."""
        return self._remove(key, "evictions")

    def expire(self, key: KVKey) -> bool:
        """As evict, counted as the end of the chunk's time to live."""
        return self._remove(key, "expired")

    def _remove(self, key: KVKey, counter: str) -> bool:
        if self.policy.read_only:
            return False
        taken_back = self._queue is not None and self._queue.take_back(key)
        try:
            with self._accessing(self.writing, key):
                removed = self._drop(key) or taken_back
        except OSError as error:
            self._could_not("remove %s", key, error)
            return taken_back
        if removed:
            self._count(counter)
            self._admission.forget_rejections()
        return removed

    def pin(self, key: KVKey) -> None:
        """Exempt a chunk from eviction by capacity, in this process, stored yet or not."""
        self._pinned.add(key)

    def unpin(self, key: KVKey) -> None:
        """Undo pin."""
        self._pinned.discard(key)

    def stats(self) -> dict[str, int | None]:
        """Return entries, bytes, capacity_bytes, and this process's counts of what happened.

        Entries and bytes are None where the tier cannot be asked.
        """
        usage = self._usage_or_none()
        with self._counts_lock:
            counts = {name: self._counts[name] for name in COUNTED}
        counts["queued"] = 0 if self._queue is None else len(self._queue)
        return {
            "entries": None if usage is None else usage.entries,
            "bytes": None if usage is None else usage.nbytes,
            "capacity_bytes": self.capacity_bytes,
            **counts,
        }

    def _usage_or_none(self) -> Usage | None:
        try:
            with self._accessing(self.writing):  # which, as this, takes a lock where there is one
                return self.usage()
        except OSError as error:
            level = logging.DEBUG if isinstance(error, OutError) else logging.WARNING
            logger.log(level, "%s tier: could not count what is stored: %s", self.name, error)
            return None

    def drain(self) -> None:
        """Take nothing more, and write what waits; what cannot be within a minute is lost."""
        chunks, nbytes = (0, 0) if self._queue is None else self._queue.close()
        if chunks:
            self._count("dropped", chunks)
            logger.warning(
                "%s tier: %d chunks (%d bytes) are lost: closed before they were written",
                self.name,
                chunks,
                nbytes,
            )

    def release(self) -> int:
        """Free the memory that chunks take here, where they do; returns its bytes.

        Pinned chunks stay, and those that are not written yet.
        """
        return 0

    def after_fork(self) -> None:
        """Begin anew in a forked process, which has none of its parent's threads.

        Locks that those held are held for ever there; what waits to be written is the parent's to
        write.
        """
        self._counts_lock = threading.Lock()
        self.reading.after_fork()
        if self.writing is not self.reading:
            self.writing.after_fork()
        self._admission.after_fork()
        if self._queue is not None:
            self._queue = WriteQueue(self._put, self.name)

    def close(self) -> None:  # noqa: B027 - most tiers have nothing to let go of
        """Let go of memory, files and connections."""

    def _let_go(
        self, key: KVKey, by_last_use: Iterable[Resident], *, excess: int, held: int, spare: int = 0
    ) -> list[KVKey]:
        """Return and count what a tier is to let go of so that a chunk fits.

        by_last_use: what is not pinned and not this chunk, least recently used first. excess: bytes
        too many. held: chunks in the tier. spare: bytes to let go of besides, at least.
        Raises RefusedError before anything is let go of in vain.
        """
        if excess <= 0:
            return []
        spare = max(spare, int((self.capacity_bytes or 0) * (1 - self.policy.watermark)))
        gone = self._admission.victims(key, by_last_use, excess=excess, spare=spare, held=held)
        self._count("admitted")
        self._count("evictions", len(gone))
        return [one.key for one in gone]

    @contextmanager
    def _accessing(self, breaker: Breaker, *keys: KVKey, timed: bool = True) -> Iterator[int]:
        """Around every access: the one place that decides what is a failure, and tells the breaker.

        A chunk that is damaged, foreign, refused or no numbers is an answer; whatever else is
        raised is a failure and raised on as OSError; it is the tier's, but for want of memory.
        keys: one to try the tier with while it is out. timed: whether what takes long counts; not
        for several chunks together.
        Raises OutError where the tier is not asked.
        """
        permit = self._permit(breaker, keys)
        began = breaker.clock()
        try:
            yield permit
        except (RefusedError, DamagedChunkError, ForeignChunkError, NotFiniteError):
            breaker.succeeded(permit)
            raise
        except Exception as error:
            if lack := lack_of_memory(error):  # no fault of the tier's
                breaker.withdrawn(permit)
                raise OSError(errno.ENOMEM, lack) from None
            self._last_failure = told(error)
            slow = timed and breaker.clock() - began >= SLOW_FAILURE_SECONDS
            breaker.failed(permit, trips=self.fails_whole or slow)
            if isinstance(error, OSError):
                raise
            logger.warning("%s tier: failed unexpectedly", self.name, exc_info=True)
            raise OSError(f"{type(error).__name__}: {error}") from error
        if not timed:  # each chunk has told for itself
            return
        seconds, most = breaker.clock() - began, self.policy.timeout_seconds
        if most is not None and seconds > most:
            self._count("errors")
            logger.warning("%s tier: took %.1f s, more than %g", self.name, seconds, most)
            self._last_failure = f"took {seconds:.1f} s, more than {most:g}"
            breaker.failed(permit)
        else:
            breaker.succeeded(permit)
            self._warned_of(breaker).clear()

    def _permit(self, breaker: Breaker, keys: Sequence[KVKey]) -> int:
        permit = breaker.ask()
        if permit is None and breaker is self.reading:
            self._try_aside(keys)
        elif permit is None:
            permit = breaker.ask_for_trial()
        if permit is None:
            raise OutError("left alone for a while after a failure")
        return permit

    def _try_aside(self, keys: Sequence[KVKey]) -> None:
        """Look a chunk up on a thread where a trial is due: a request does not wait for it."""
        if keys and (permit := self.reading.ask_for_trial()) is not None:
            trial = Thread(target=self._try, args=(permit, keys[0]), daemon=True, name="kv-trial")
            try:
                trial.start()
            except RuntimeError:  # no thread can be started now: later
                self.reading.failed(permit)

    def _try(self, permit: int, key: KVKey) -> None:
        began = self.reading.clock()
        try:
            self._entry(key)
        except Exception as error:
            if lack_of_memory(error):
                self.reading.withdrawn(permit)
                return
            logger.warning("%s tier: still fails: %s", self.name, error)
            self.reading.failed(permit)
            return
        most = self.policy.timeout_seconds
        if most is not None and self.reading.clock() - began > most:
            self.reading.failed(permit)
            return
        logger.warning("%s tier: answers again", self.name)
        self.reading.succeeded(permit)

    def _could_not(
        self, what: str, key: KVKey, error: OSError, *, skipped: str = "dropped"
    ) -> None:
        """Count what failed, and log it: one warning a cause, until an access succeeds.

        Quietly where the tier was out, which was said before.
        """
        out = isinstance(error, OutError)
        self._count(skipped if out else "errors")
        warned = self._warned_of(self.reading if skipped == "skipped" else self.writing)
        cause = what + told(error)
        level = logging.DEBUG if out or cause in warned else logging.WARNING
        if not out:
            warned.add(cause)
        logger.log(level, f"%s tier: could not {what}: %s", self.name, key, error)

    def _warned_of(self, breaker: Breaker) -> set[str]:
        """Return the causes that were logged since an access of this kind succeeded last."""
        return self._warned_writing if breaker is self.writing else self._warned_reading

    def _count(self, name: str, times: int = 1) -> int:
        with self._counts_lock:
            self._counts[name] += times
            return self._counts[name]


def _entry_of(chunk: StoredChunk) -> Entry:
    return Entry(chunk.kv.nbytes, chunk.written_at, chunk.written_at)


def _side_by_side(do: Callable[[KVKey], T], keys: Sequence[KVKey], at_once: int) -> list[T]:
    """Return what ``do`` makes of each key, so many at once."""
    threads = min(at_once, len(keys))
    if threads <= 1:
        return [do(key) for key in keys]
    with ThreadPoolExecutor(threads, thread_name_prefix="kv-tier") as pool:
        return list(pool.map(do, keys))
