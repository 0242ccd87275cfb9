"""Runs an application by uvicorn until the process is told to end, and bounds requests' headers."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType
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

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End; uvicorn would raise the signal again afterwards, and so end the process."""
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = True
        self.should_exit = True


def run(app: FastAPI, host: str, port: int, ready: Callable[[], None]) -> None:
    """Serve an application until SIGINT or SIGTERM; then return, so that an engine is closed.

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
    _Server(config, ready).run()
