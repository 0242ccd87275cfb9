"""Bounds how many requests run and wait, and stops the work of clients that have gone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from starlette.requests import Request

from cacheblend_rag.api.errors import busy
from cacheblend_rag.engines.lifetime import in_thread, working

T = TypeVar("T")

RUNNING = 8
"""So many answers are computed at the same time; further ones wait."""
LEFT = 2
"""At most RUNNING minus this many answers of a single request are computed at the same time."""
PREPARING = 2
"""Most prompts that are prepared at the same time."""
WAITING = 64
"""So many requests wait at most; further ones are refused."""


class Gate:
    """Lets requests in, up to a bound, and their answers run, up to another.

    Attributes:
        turn: an answer holds it while it is computed.
        most_of_one: most answers of a single request that are computed at the same time.
    """

    def __init__(self, running: int = RUNNING, waiting: int = WAITING) -> None:
        self.turn = asyncio.Semaphore(running)
        self.most_of_one = max(1, running - LEFT)
        self._preparing = asyncio.Semaphore(PREPARING)
        self._most, self._inside = running + waiting, 0

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Let a request in; raises ApiError (503, with Retry-After) when too many wait."""
        if self._inside >= self._most:
            raise busy(f"{self._inside} requests are running or waiting: try again later")
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1

    async def prepared(self, prepare: Callable[[], T]) -> T:
        """Prepare a prompt off the event loop."""

        def work() -> T:
            with working():
                return prepare()

        return await in_place(self._preparing, work)


async def in_place(places: asyncio.Semaphore, work: Callable[[], T]) -> T:
    """Return the result of work in a thread, which takes one of some places.

    The place is kept until the thread has ended, also after the client has left.
    """
    async with places:
        done = asyncio.ensure_future(in_thread(work))
        try:
            return await asyncio.shield(done)
        except asyncio.CancelledError:
            await asyncio.wait({done})
            raise


class ClientGoneError(Exception):
    """The client has hung up: nobody reads the answer."""


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """Return what ``work`` returns; cancel it, and raise ClientGoneError, once the client goes."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGoneError
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
