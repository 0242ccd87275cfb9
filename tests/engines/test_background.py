"""BackgroundLoop: what is at work when it closes, and what would begin then."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from queue import SimpleQueue
from threading import Event
from threading import enumerate as enumerate_threads
from typing import Any

import pytest

from cacheblend_rag.engines.background import BackgroundLoop
from cacheblend_rag.engines.lifetime import CLOSED
from cacheblend_rag.engines.stream import Cancellation, result_of
from cacheblend_rag.errors import ConfigError

PATIENCE = 30.0
REFUSED = re.escape(CLOSED)


async def nothing() -> None:
    """Work that is done at once."""


def test_nothing_begins_once_it_closes() -> None:
    """Not even while the last work is done, which would be left at that."""
    loop, refused = BackgroundLoop("test"), []

    async def items() -> AsyncIterator[int]:
        yield 1

    async def last() -> None:
        for begin in (
            lambda: loop.run(nothing()),
            lambda: loop.stream(items(), Cancellation()).future(),
        ):
            with pytest.raises(ConfigError, match=REFUSED):
                begin()
            refused.append(begin)

    loop.close(last)
    assert len(refused) == 2
    loop.close(last)
    assert len(refused) == 2, "it was closed before"


def test_what_is_at_work_ends_before_the_last_work() -> None:
    loop, begun, seen = BackgroundLoop("test"), Event(), SimpleQueue[Any]()

    async def items() -> AsyncIterator[int]:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)
            seen.put("cleaned up")
        yield 1

    async def last() -> None:
        seen.put("last")

    told = loop.stream(items(), Cancellation()).future()
    assert begun.wait(PATIENCE)
    loop.close(last)
    assert [seen.get(timeout=PATIENCE) for _ in range(2)] == ["cleaned up", "last"]
    with pytest.raises(ConfigError, match=REFUSED):
        result_of(told)


def test_the_thread_ends_when_the_last_work_fails() -> None:
    loop = BackgroundLoop("failing at last")
    (thread,) = (one for one in enumerate_threads() if one.name == "failing at last")

    async def last() -> None:
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        loop.close(last)
    assert not thread.is_alive()
    assert loop.loop.is_closed()


def test_its_own_thread_is_refused_instead_of_waiting_for_itself() -> None:
    loop, told = BackgroundLoop("test"), list[str]()

    async def items() -> AsyncIterator[int]:
        yield 1

    async def work() -> None:
        stream = loop.stream(items(), Cancellation())
        for ask in (lambda: loop.run(nothing()), stream.last, lambda: list(stream)):
            with pytest.raises(ConfigError, match="in the thread that makes its answers") as error:
                ask()
            told.append(str(error.value))

    try:
        loop.start(work()).result(PATIENCE)
    finally:
        loop.close()
    assert len(told) == 3
