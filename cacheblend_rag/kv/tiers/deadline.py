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
from typing import Any

SENT_AT_ONCE = 1 << 20
"""Bytes sent in one call, so that the deadline is checked in between."""


class _Deadline(threading.local):
    """Of a thread: the time by which its operation must be done, and how much may arrive till then.

    ends: by the monotonic clock; None if there is no operation.
    """

    ends: float | None = None
    bytes_left = 0


_current = _Deadline()


@contextmanager
def deadline(seconds: float, most_bytes: int) -> Iterator[None]:
    """Limit this thread's use of bounded sockets to so many seconds and bytes in total."""
    _current.ends, _current.bytes_left = time.monotonic() + seconds, most_bytes
    try:
        yield
    finally:
        _current.ends = None


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
        self._wait_no_longer()
        data = self._socket.recv(nbytes, flags)
        _count(len(data))
        return data

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        """As recv, into a buffer."""
        self._wait_no_longer()
        received = self._socket.recv_into(buffer, nbytes, flags)
        _count(received)
        return received

    def sendall(self, data: Any) -> None:
        """As a socket's; raises TimeoutError when not all is sent by the deadline."""
        left = memoryview(data).cast("B")
        while left:
            self._wait_no_longer()
            left = left[self._socket.send(left[:SENT_AT_ONCE]) :]

    def _wait_no_longer(self) -> None:
        if _current.ends is not None:
            left = _current.ends - time.monotonic()
            if left <= 0:
                raise TimeoutError("the whole answer did not arrive in time")
            self._socket.settimeout(left if self._timeout is None else min(left, self._timeout))


def _count(received: int) -> None:
    if _current.ends is not None:
        _current.bytes_left -= received
        if _current.bytes_left < 0:
            raise OSError("the server sends more than was asked for")
