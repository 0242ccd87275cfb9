"""Waits in the background loop for what vLLM answers, unless it is cancelled meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

from cacheblend_rag.engines.stream import Cancellation
from cacheblend_rag.engines.vllm.transport import Piece

T = TypeVar("T")

CANCEL_SECONDS = 0.05


async def until_over(work: Coroutine[Any, Any, T], cancel: Cancellation) -> AsyncIterator[T]:
    """Yield a result once it is there, or nothing if the work is cancelled before."""
    task = asyncio.ensure_future(work)
    try:
        while not cancel.is_set():
            if (await asyncio.wait([task], timeout=CANCEL_SECONDS))[0]:
                yield task.result()
                return
    finally:
        task.cancel()


async def next_piece(pieces: AsyncIterator[Piece], cancel: Cancellation) -> Piece | None:
    """Return the next piece, or None if there is none or the request is cancelled.

    Cancellation is polled. The piece is awaited in this task itself: a separate task could be left
    running if this one were cancelled while it waits for that task's cancellation.
    """
    loop = asyncio.get_running_loop()
    later: asyncio.TimerHandle

    def look() -> None:
        nonlocal later
        if cancel.is_set():
            limit.reschedule(loop.time())
        else:
            later = loop.call_later(CANCEL_SECONDS, look)

    later = loop.call_later(CANCEL_SECONDS, look)
    try:
        async with asyncio.timeout(None) as limit:
            piece = await anext(pieces)
    except StopAsyncIteration:
        return None
    except Exception:  # also TimeoutError, of our own or of who makes pieces
        if not limit.expired():
            raise
        return None
    finally:
        later.cancel()
    return None if cancel.is_set() else piece
