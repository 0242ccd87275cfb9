"""FaultyProxy: between clients and a server, to do to their connections what its state says."""

from __future__ import annotations

import os
import random
import socket
import threading
from collections import deque
from contextlib import suppress
from typing import Literal, Self

from tests.local_servers import HOST

State = Literal["passes", "refuses", "hangs", "drips", "is random", "repeats", "cuts short"]
PASSES: State = "passes"
FAULTS: tuple[State, ...] = ("refuses", "hangs", "drips", "is random", "repeats", "cuts short")
KEPT_ANSWERS = 64
PATIENCE_SECONDS = 0.2


class FaultyProxy:
    """Passes connections on to a server's port, and does what ``state`` says to its answers.

    ``refuses``: nobody listens, and open connections end. ``hangs``: answers are held back.
    ``drips``: a byte a second. ``is random``: as many random bytes. ``repeats``: what was answered
    to somebody before, of the same length where there is such. ``cuts short``: half of what comes,
    then the end. A change of state ends all connections.
    """

    def __init__(self, upstream: int) -> None:
        self._upstream = upstream
        self._listening = socket.create_server((HOST, 0))
        self.port: int = self._listening.getsockname()[1]
        self._state: State = PASSES
        self._changed = threading.Event()
        self._earlier: deque[bytes] = deque(maxlen=KEPT_ANSWERS)
        self._draw = random.Random(0)
        self._lock = threading.Lock()
        self._open = set[threading.Thread]()
        self._accept()

    @property
    def state(self) -> State:
        """What is done to connections now; those that are open have ended once it is set."""
        return self._state

    @state.setter
    def state(self, state: State) -> None:
        with self._lock:
            self._changed.set()
            self._changed = threading.Event()
            was, self._state = self._state, state
            ending, self._open = self._open, set()
            if state == "refuses":
                self._listening.shutdown(socket.SHUT_RDWR)  # a thread that accepts keeps it open
                self._listening.close()
            elif was == "refuses":
                self._listening = socket.create_server((HOST, self.port))
                self._accept()
        for connection in ending:
            connection.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._changed.set()
        self._listening.close()

    def _accept(self) -> None:
        threading.Thread(target=self._serve, args=(self._listening,), daemon=True).start()

    def _serve(self, listening: socket.socket) -> None:
        listening.settimeout(PATIENCE_SECONDS)
        while True:
            try:
                client, _ = listening.accept()
            except TimeoutError:
                continue
            except OSError:  # closed
                return
            with self._lock:
                work = (client, self._state, self._changed)
                connection = threading.Thread(target=self._connect, args=work, daemon=True)
                self._open.add(connection)
                connection.start()

    def _connect(self, client: socket.socket, state: State, changed: threading.Event) -> None:
        with client, socket.create_connection((HOST, self._upstream)) as server:
            ways = [
                threading.Thread(target=self._ask, args=(client, server, changed), daemon=True),
                threading.Thread(
                    target=self._answer, args=(server, client, state, changed), daemon=True
                ),
            ]
            for way in ways:
                way.start()
            for way in ways:
                way.join()

    def _ask(self, client: socket.socket, server: socket.socket, changed: threading.Event) -> None:
        with suppress(OSError):
            while data := _received(client, changed):
                server.sendall(data)
        _end(client, server)

    def _answer(
        self,
        server: socket.socket,
        client: socket.socket,
        state: State,
        changed: threading.Event,
    ) -> None:
        with suppress(OSError):
            while data := _received(server, changed):
                if state == "hangs":
                    changed.wait()
                    break
                if state == "cuts short":
                    client.sendall(data[: len(data) // 2])
                    break
                if state == "drips":
                    _drip(client, data, changed)
                else:
                    client.sendall(self._told(data, state))
        _end(client, server)

    def _told(self, data: bytes, state: State) -> bytes:
        if state == "is random":
            return os.urandom(len(data))
        if state == "repeats" and self._earlier:
            earlier = list(self._earlier)
            alike = [one for one in earlier if len(one) == len(data) and one != data]
            return self._draw.choice(alike or earlier)
        self._earlier.append(data)
        return data


def _received(source: socket.socket, changed: threading.Event) -> bytes:
    """Return what comes next; nothing once the connection or the state is over."""
    source.settimeout(PATIENCE_SECONDS)
    while not changed.is_set():
        try:
            data = source.recv(1 << 16)
        except TimeoutError:
            continue
        return b"" if changed.is_set() else data
    return b""


def _drip(client: socket.socket, data: bytes, changed: threading.Event) -> None:
    for byte in data:
        client.sendall(bytes([byte]))
        if changed.wait(1.0):
            return


def _end(*sockets: socket.socket) -> None:
    for one in sockets:
        with suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
