"""A deadline for a whole network answer, and a limit on its bytes.

A socket's own timeout holds for each call of ``recv``: a server that sends a byte per second never
exceeds it.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

SENT_AT_ONCE = 1 << 20
"""Bytes sent in one call, so that the deadline is checked in between."""


@dataclass
class Deadline:
    """The time by which an operation must be done, and how many bytes may still arrive for it.

    ends: by the monotonic clock. bytes_left: None is without limit.
    """

    ends: float
    bytes_left: int | None = None

    def seconds_left(self) -> float:
        """Return how long the operation may still take; raises TimeoutError at its end."""
        left = self.ends - time.monotonic()
        if left <= 0:
            raise TimeoutError("the whole answer did not arrive in time")
        return left

    def received(self, nbytes: int) -> None:
        """Count bytes that arrived; raises OSError when they are more than were asked for."""
        if self.bytes_left is None:
            return
        self.bytes_left -= nbytes
        if self.bytes_left < 0:
            raise OSError("the server sends more than was asked for")


_current = threading.local()


@contextmanager
def deadline(seconds: float, most_bytes: int | None = None) -> Iterator[Deadline]:
    """Limit this thread's use of bounded sockets to so many seconds and bytes in total.

    Inside another deadline, the earlier end counts, and the inner limit of bytes.
    """
    outer: Deadline | None = getattr(_current, "deadline", None)
    ends = time.monotonic() + seconds
    inner = Deadline(ends if outer is None else min(ends, outer.ends), most_bytes)
    _current.deadline = inner
    try:
        yield inner
    finally:
        _current.deadline = outer


class BoundedSocket:
    """A connected socket that enforces the deadline of the thread that uses it.

    Without a deadline its own timeout holds, as for any socket.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket, self._timeout = sock, sock.gettimeout()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)

    def settimeout(self, seconds: float | None) -> None:
        """Wait at most so long in each call, and no longer than to the deadline."""
        self._timeout = seconds
        self._socket.settimeout(seconds)

    def recv(self, nbytes: int, flags: int = 0) -> bytes:
        """As a socket's; raises TimeoutError, and OSError for more bytes than were asked for."""
        current = self._wait_no_longer()
        data = self._socket.recv(nbytes, flags)
        if current is not None:
            current.received(len(data))
        return data

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        """As recv, into a buffer."""
        current = self._wait_no_longer()
        received = self._socket.recv_into(buffer, nbytes, flags)
        if current is not None:
            current.received(received)
        return received

    def sendall(self, data: Any) -> None:
        """As a socket's; raises TimeoutError when not all is sent by the deadline."""
        left = memoryview(data).cast("B")
        while left:
            self._wait_no_longer()
            left = left[self._socket.send(left[:SENT_AT_ONCE]) :]

    def _wait_no_longer(self) -> Deadline | None:
        current: Deadline | None = getattr(_current, "deadline", None)
        if current is not None:
            left = current.seconds_left()
            self._socket.settimeout(left if self._timeout is None else min(left, self._timeout))
        return current
