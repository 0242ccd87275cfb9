"""BackgroundLoop: who waits in its own thread is refused."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from cacheblend_rag.engines.stream import BackgroundLoop, Cancellation
from cacheblend_rag.errors import ConfigError

PATIENCE = 30.0


def test_its_own_thread_is_refused_instead_of_waiting_for_itself() -> None:
    loop, told = BackgroundLoop("test"), list[str]()

    async def items() -> AsyncIterator[int]:
        yield 1

    async def nothing() -> None: ...

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
