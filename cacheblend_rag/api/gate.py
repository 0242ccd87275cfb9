"""Bounds how many requests run, wait and hold threads; stops the work of clients that have gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from http import HTTPStatus
from typing import Any, TypeVar

from starlette.requests import Request

from cacheblend_rag.engines.base import Engine
from cacheblend_rag.engines.lifetime import in_thread, working
from cacheblend_rag.engines.vllm.refused import ApiError

T = TypeVar("T")

RUNNING = 8
"""So many answers are computed at the same time; further ones wait."""
LEFT = 2
"""At most RUNNING minus this many answers of a single request are computed at the same time."""
PREPARING = 2
"""Most requests whose prompts are prepared at the same time."""
WAITING = 64
"""So many requests wait at most; further ones are refused."""
MOST_JOBS = 256
"""Most jobs of remote engines that run at the same time; further ones get 503."""
MOST_LENT = 32
"""So many requests have an engine, or wait for it, at most."""
CHANGES, READS = 4, 8
"""So many of them have it at the same time."""
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

        async with self._preparing:
            return await to_its_end(work)


async def to_its_end(work: Callable[[], T]) -> T:
    """Return the result of work in a thread, which does not keep the process from ending.

    Also when this is cancelled, it waits for the thread's end: what is held meanwhile is kept.
    """
    done = asyncio.ensure_future(in_thread(work))
    try:
        return await asyncio.shield(done)
    except asyncio.CancelledError:
        await asyncio.wait({done})
        raise


class EngineLending:
    """Lends a request's engine to its route: to a few reads, and to a few changes, at a time.

    engine_of: returns the engine of a request. It is called in a thread, so it may take a while,
    and raises a CacheBlendError when there is none.
    """

    def __init__(self, engine_of: Callable[[Request], Engine]) -> None:
        self._engine_of = engine_of
        self._gate, self._jobs = Gate(MOST_LENT, 0), Gate(MOST_JOBS, 0)
        self._changes, self._reads = asyncio.Semaphore(CHANGES), asyncio.Semaphore(READS)
        self._turns = [asyncio.Lock() for _ in range(TURNS)]

    @asynccontextmanager
    async def lent_for_a_job(self, request: Request) -> AsyncIterator[Engine]:
        """Lend a request's engine for a job: they may take long, and have a limit of their own."""
        with self._jobs.entered():
            yield await in_thread(lambda: self._engine_of(request))

    @asynccontextmanager
    async def lent(self, request: Request, changed: str | None = None) -> AsyncIterator[Engine]:
        """Lend a request's engine for the block; raises ApiError if too many requests wait.

        changed: the name of what the block changes, in its turn after others' changes of the same.
        """
        with self._gate.entered():
            engine = await in_thread(lambda: self._engine_of(request))
            if changed is None:
                async with self._reads:
                    yield engine
            else:
                async with self._turns[hash((id(engine), changed)) % TURNS], self._changes:
                    yield engine


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
