"""Bounds how many requests run, wait and hold threads; stops the work of clients that have gone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from threading import Lock
from typing import Any, Concatenate, ParamSpec, TypeVar

from starlette.requests import Request

from cacheblend_rag.engines.base import Engine
from cacheblend_rag.engines.lifetime import in_thread, working
from cacheblend_rag.engines.vllm.refused import ApiError

T = TypeVar("T")
P = ParamSpec("P")
EngineOf = Callable[[Request], Engine]
Work = Callable[Concatenate[Engine, P], T]

RUNNING = 8
"""So many answers are computed at the same time; further ones wait."""
LEFT = 2
"""At most RUNNING minus this many answers of a single request are computed at the same time."""
PREPARING = 2
"""Most requests whose prompts are prepared at the same time."""
WAITING = 64
"""So many requests wait at most; further ones are refused."""
MOST_WORK = 32
"""So many requests for work with an engine run or wait at most."""
CHANGES, READS = 4, 8
"""So many of them run at the same time."""
TURNS = 64


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
            raise ApiError(
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"{self._inside} requests are running or waiting: try again later",
                code="overloaded",
            )
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1

    async def prepared(self, prepare: Callable[[], T]) -> T:
        """Prepare a request's prompts off the event loop."""

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


class EngineWork:
    """Runs work with a request's engine to its end: a few reads, and a few changes, at a time.

    engine_of: returns the engine of a request. It is called in a thread, so it may take a while,
    and raises a CacheBlendError when there is none.
    """

    def __init__(self, engine_of: EngineOf) -> None:
        self._engine_of = engine_of
        self._gate = Gate(MOST_WORK, 0)
        self._changing, self._reading = asyncio.Semaphore(CHANGES), asyncio.Semaphore(READS)
        self._turns = [Lock() for _ in range(TURNS)]

    async def read(self, request: Request, work: Work[P, T], *args: P.args, **more: P.kwargs) -> T:
        """Return the result of work; raises ApiError if too many requests wait."""
        with self._gate.entered():
            return await in_place(
                self._reading, lambda: work(self._engine_of(request), *args, **more)
            )

    async def change(
        self, request: Request, name: str, work: Work[P, T], *args: P.args, **more: P.kwargs
    ) -> T:
        """Return the result of work that changes what is called so, one change at a time."""

        def in_turn() -> T:
            engine = self._engine_of(request)
            with self._turns[hash((id(engine), name)) % TURNS]:
                return work(engine, *args, **more)

        with self._gate.entered():
            return await in_place(self._changing, in_turn)


class ClientGoneError(Exception):
    """The client has hung up: nobody reads the answer."""


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """Return what ``work`` returns; cancel it, and raise ClientGoneError, once the client goes."""
    running = asyncio.ensure_future(work)
    watching = asyncio.create_task(_end_with_client(request, running))
    try:
        return await running
    except asyncio.CancelledError:
        if watching.done():
            raise ClientGoneError from None
        raise
    finally:
        watching.cancel()


async def _end_with_client(request: Request, running: asyncio.Future[Any]) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
    running.cancel()
