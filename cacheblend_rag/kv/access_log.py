"""A log of the stored chunks that prompts asked for, as JSON lines, for warming a store.

A line is ``{"at": 1760000000, "keys": ["..."]}``: the keys of one prompt's chunks that were found
in the store. It holds no text. A full log continues in a new file; the old file is kept as ``.1``.

Every client that may ask questions causes lines, so everything is bounded: bytes of a file, keys of
a line, what a process writes per minute in total and about one chunk, and how much is read of a
larger file.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

from cacheblend_rag.errors import StoreError
from cacheblend_rag.kv.chunk_kv import KVKey
from cacheblend_rag.kv.shared_chunk import Found

logger = logging.getLogger(__name__)

MOST_BYTES = 8 << 20
"""Size at which a log continues in a new file, and the most that is read of each file."""
MOST_KEYS_A_LINE = 1024
LONGEST_LINE = 256 << 10
MOST_KEYS = 1 << 16
"""Most different chunks read from a log: those of the latest lines."""
NOTED_A_MINUTE = 10
"""How often one chunk is logged per minute, so that repeating a question does not dominate."""
BYTES_A_MINUTE = 1 << 20
"""Most bytes that a process writes per minute, so that a full log covers at least minutes."""
TRIES = 3


class AccessLog:
    """A log in a regular file, which several processes may write without waiting.

    Writing and reading never raise: failures are logged once and ignored.

    Args:
        path: the file; its folder must exist.
        most_bytes: size at which it continues in a new file, and the most that is read of each
            file.
        clock: returns the time in seconds.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        most_bytes: int = MOST_BYTES,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.path = Path(path).expanduser().absolute()
        self._most_bytes, self._clock = most_bytes, clock
        self._lock = threading.Lock()
        self._minute, self._noted, self._written = -1, Counter[KVKey](), 0
        self._warned = False

    def check(self) -> None:
        """Check that the log's files, if they exist, are regular files.

        Raises:
            StoreError: if one is a link, a pipe, a device or a folder.
        """
        for path in (self.path, self._before):
            try:
                mode = os.lstat(path).st_mode
            except OSError:  # not there; other errors are reported when it is used
                continue
            if not stat.S_ISREG(mode):
                raise StoreError(
                    f"access log {path} is not a regular file: give access_log another path"
                )

    def note(self, keys: Sequence[KVKey]) -> None:
        """Log the chunks of a prompt that were found in the store."""
        now = int(self._clock())
        with self._lock:
            noted = self._to_note(now, keys)
            line = json.dumps({"at": now, "keys": [str(key) for key in noted]}).encode() + b"\n"
            if not noted or self._written + len(line) > BYTES_A_MINUTE:
                return
            self._written += len(line)
            self._noted.update(noted)
            try:
                self._append(line)
            except OSError as error:
                self._warn(self.path, "written", error)

    def most_used(self, stop: Callable[[], bool] = lambda: False) -> list[KVKey]:
        """Return the logged keys, the most requested first.

        Of equally requested keys, the latest comes first. Malformed lines are skipped.

        Args:
            stop: called between lines; reading ends once it returns True.
        """
        counts, latest = Counter[KVKey](), dict[KVKey, int]()
        for number, line in enumerate(self._lines()):
            if stop():
                return []
            for key in _keys_of(line):
                if key in latest or len(latest) < MOST_KEYS:
                    counts[key] += 1
                    latest.setdefault(key, -number)
        return sorted(counts, key=lambda key: (counts[key], latest[key]), reverse=True)

    def _to_note(self, now: int, keys: Sequence[KVKey]) -> list[KVKey]:
        """Return the prompt's keys that have not reached this minute's limit yet."""
        if now // 60 != self._minute:
            self._minute, self._written = now // 60, 0
            self._noted.clear()
        some = list(dict.fromkeys(keys))[:MOST_KEYS_A_LINE]
        return [key for key in some if self._noted[key] < NOTED_A_MINUTE]

    def _append(self, line: bytes) -> None:
        """Append a line in one write, so that lines of several processes do not mix."""
        for _ in range(TRIES):
            descriptor = _opened(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            try:
                size = os.fstat(descriptor).st_size
                is_full = size > 0 and size + len(line) > self._most_bytes
                if not is_full or not self._rotate(descriptor):
                    os.write(descriptor, line)
                    return
            finally:
                os.close(descriptor)

    def _rotate(self, descriptor: int) -> bool:
        """Rename a full file to ``.1``, in one process only; returns whether to reopen the log.

        False: another process is about to rename it, so the line is still written to it.
        """
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:  # a file system without locks: two processes may rename, a line be lost
            pass
        try:
            is_current = os.path.samestat(os.fstat(descriptor), os.lstat(self.path))
        except FileNotFoundError:
            is_current = False
        if is_current:  # else another process has renamed it meanwhile, and begun a new file
            os.replace(self.path, self._before)
        return True

    @property
    def _before(self) -> Path:
        return self.path.with_name(f"{self.path.name}.1")

    def _lines(self) -> Iterator[bytes]:
        """Yield the lines of both files, the latest first."""
        for path in (self.path, self._before):
            try:
                lines = _tail(path, self._most_bytes).split(b"\n")
            except FileNotFoundError:
                continue
            except OSError as error:
                self._warn(path, "read", error)
                continue
            yield from reversed(lines)

    def _warn(self, path: Path, what: str, error: OSError) -> None:
        if not self._warned:
            logger.warning("access log %s cannot be %s: %s", path, what, error.strerror or error)
        self._warned = True


class FoundChunks:
    """Collects which chunks of a prompt are found, and reports them once all were looked up.

    An abandoned prompt reports nothing. Used by the threads that look chunks up.

    Args:
        keys: the prompt's chunks.
        tell: called once with those that were found, in the prompt's order, if any was.
    """

    def __init__(self, keys: Sequence[KVKey], tell: Callable[[list[KVKey]], None]) -> None:
        self._keys, self._tell = keys, tell
        self._found: set[KVKey] = set()
        self._left, self._lock = len(keys), threading.Lock()

    def watch(self, key: KVKey, opened: Future[Found]) -> None:
        """Record the result of looking a chunk up."""
        opened.add_done_callback(lambda done: self._add(key, done))

    def _add(self, key: KVKey, opened: Future[Found]) -> None:
        is_there = not opened.cancelled() and opened.exception() is None
        with self._lock:
            if is_there and opened.result().chunk is not None:
                self._found.add(key)
            self._left -= 1
            is_last = self._left == 0
        if is_last and self._found:
            self._tell([key for key in self._keys if key in self._found])


def _opened(path: Path, flags: int) -> int:
    """Open a regular file, without following links or blocking on pipes."""
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file")
    return descriptor


def _tail(path: Path, most_bytes: int) -> bytes:
    """Return the last bytes of a file."""
    with os.fdopen(_opened(path, os.O_RDONLY), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(0, size - most_bytes))
        return file.read(most_bytes)


def _keys_of(line: bytes) -> Iterable[KVKey]:
    """Return the keys of a line, each once; empty for a malformed line."""
    if not line or len(line) > LONGEST_LINE:
        return ()
    try:
        told = json.loads(line)
        return {KVKey.parse(key): None for key in told["keys"][:MOST_KEYS_A_LINE]}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return ()
