"""AccessLog: which chunks prompts asked for, as lines of JSON, to warm a store by.

A line is ``{"at": 1760000000, "keys": ["..."]}``: the chunks of one prompt, by key. There is no
text in it. A log that has grown to its bound goes on in a new file; the one before it is kept as
``.1``.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from cacheblend_rag.kv.chunk_kv import KVKey

logger = logging.getLogger(__name__)

MOST_BYTES = 64 << 20
LONGEST_LINE = 1 << 20


class AccessLog:
    """A log in a file, which several processes may write and none waits for.

    Nothing here raises: what cannot be written is not noted, and said once.
    """

    def __init__(self, path: str | os.PathLike[str], most_bytes: int = MOST_BYTES) -> None:
        self.path = Path(path).expanduser().absolute()
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._failed = False

    def note(self, keys: Sequence[KVKey]) -> None:
        """Note the chunks of a prompt."""
        line = json.dumps({"at": int(time.time()), "keys": [str(key) for key in keys]})
        try:
            with self._lock:
                self._append(f"{line}\n".encode())
        except OSError as error:
            if not self._failed:
                logger.warning("access log %s cannot be written: %s", self.path, error)
            self._failed = True

    def most_used(self) -> list[KVKey]:
        """Return the keys that are noted, those that most prompts asked for first.

        Of equal ones, the latest comes first. Lines that are none are passed over.
        """
        counts, latest = Counter[KVKey](), dict[KVKey, int]()
        for number, keys in enumerate(self._lines()):
            counts.update(keys)
            latest |= dict.fromkeys(keys, number)
        return sorted(counts, key=lambda key: (counts[key], latest[key]), reverse=True)

    def _append(self, line: bytes) -> None:
        """Write a line at once, so that lines of several processes do not mix."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
        descriptor = os.open(self.path, flags, 0o600)
        try:
            size = os.fstat(descriptor).st_size
            os.write(descriptor, line)
        finally:
            os.close(descriptor)
        if size + len(line) > self._most_bytes:
            os.replace(self.path, self._before)

    @property
    def _before(self) -> Path:
        return self.path.with_name(f"{self.path.name}.1")

    def _lines(self) -> Iterator[list[KVKey]]:
        for path in (self._before, self.path):
            try:
                with path.open("rb") as file:
                    while line := file.readline(LONGEST_LINE):
                        yield list(_keys_of(line))
            except FileNotFoundError:
                continue
            except OSError as error:
                logger.warning("access log %s cannot be read: %s", path, error)


def _keys_of(line: bytes) -> Iterable[KVKey]:
    try:
        told = json.loads(line)
        return {KVKey.parse(key): None for key in told["keys"]}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return ()
