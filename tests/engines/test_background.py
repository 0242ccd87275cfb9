"""BackgroundLoop: what is at work when it closes, and what would begin then."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

import pytest

from cacheblend_rag.engines.background import BackgroundLoop
from cacheblend_rag.engines.lifetime import CLOSED
from cacheblend_rag.engines.stream import Cancellation
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
