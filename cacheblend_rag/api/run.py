"""Runs an application by uvicorn until the process is told to end, and bounds requests' headers."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.config import HTTP_PROTOCOLS
from uvicorn.protocols.http.auto import AutoHTTPProtocol

STOP_SECONDS = 1
"""So long, answers that are being sent may go on after the server was told to end."""
BACKLOG = 128
HEADER_SECONDS = 20.0
"""So long, a connection may take to send a request's headers."""
MOST_HEADER_BYTES = 1 << 16


class BoundedProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type] # chosen by uvicorn
    """uvicorn's HTTP, which itself waits for headers, and at the server's end for clients."""

    _sent = 0
    """Bytes of headers that are not complete."""

    def connection_made(self, transport: Any) -> None:
        """Begin to wait for a request."""
        super().connection_made(transport)
        self._give_up_later()

    def data_received(self, data: bytes) -> None:
        """Read data, and bound what is no complete request."""
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._sent = 0
            return
        self._sent += len(data)
        if self._sent > MOST_HEADER_BYTES:
            self.transport.close()
        elif self._sent == len(data):
            self._give_up_later()

    def shutdown(self) -> None:
        """End the connection with the server: soon, whatever its client still sends or reads."""
        super().shutdown()
        self.loop.call_later(STOP_SECONDS, self.transport.abort)

    def _give_up_later(self) -> None:
        self.loop.call_later(HEADER_SECONDS, self._give_up, self.cycle)

    def _give_up(self, before: Any) -> None:
        if self.cycle is before and self.transport.get_protocol() is self:  # no websocket's
            self.transport.close()


def bound_headers() -> None:
    """Have the servers that uvicorn starts in this process use this protocol."""
    HTTP_PROTOCOLS["auto"] = f"{__name__}:{BoundedProtocol.__name__}"


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._ready()


def run(app: FastAPI, host: str, port: int, ready: Callable[[], None]) -> None:
    """Serve an application until SIGINT or SIGTERM; then return, so that an engine is closed.

    Args:
        app: the application.
        host: where to listen.
        port: where to listen.
        ready: is called once it listens.
    """
    bound_headers()
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        log_level="warning",
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=STOP_SECONDS,
    )
    with _signals_that_end_the_server():
        _Server(config, ready).run()


@contextmanager
def _signals_that_end_the_server() -> Iterator[None]:
    """Keep signals that uvicorn raises again, once it has ended, from ending the process."""
    if current_thread() is not main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda *_: None) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
