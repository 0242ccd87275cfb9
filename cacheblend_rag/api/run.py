"""Runs an application by uvicorn until the process is told to end."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread
from typing import Any

import uvicorn
from fastapi import FastAPI

STOP_SECONDS = 5
"""So long, answers that are being sent may go on after the server was told to end."""
BACKLOG = 128


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
