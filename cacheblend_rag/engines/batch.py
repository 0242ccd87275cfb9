"""Batches: prompts that share chunk KV run next to each other, a few at a time.

Chunk KV that one of them loaded is then still in memory for the others, even if all prompts
together have more chunks than fit there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from typing import cast

from cacheblend_rag.engines.answer import Delta, Generation, Request
from cacheblend_rag.engines.stream import Stream, result_of
from cacheblend_rag.errors import OutOfMemoryError
from cacheblend_rag.kv.chunk_kv import KVKey

MOST_TOGETHER = 8
"""Most prompts that are at work at the same time."""
MOST_COMPARED = 64
"""The next prompt is one of so many that have waited longest."""


def by_overlap(prompts: Sequence[Mapping[KVKey, int]]) -> list[int]:
    """Return the indices of prompts in the order in which they are answered.

    The next one shares most tokens with those that began last; of equal ones it is the first.
    prompts: the chunks of each, with their numbers of tokens.
    """
    waiting, order = [*range(len(prompts))], list[int]()
    while waiting:
        loaded = set[KVKey]().union(*(prompts[index] for index in order[-MOST_TOGETHER:]))
        shared = [
            sum(tokens for key, tokens in prompts[index].items() if key in loaded)
            for index in waiting[:MOST_COMPARED]
        ]
        order.append(waiting.pop(shared.index(max(shared))))
    return order


def answer_batch(
    start: Callable[[Request], Stream[Delta]], requests: Sequence[Request]
) -> list[Generation]:
    """Return the answers of requests, in their order.

    One that finds no memory beside the others is answered again after them. If one fails, the
    others are cancelled and its error is raised.

    Args:
        start: begins to answer a request.
        requests: at most ``MOST_TOGETHER`` of them are answered at a time.
    """
    chunks = [{one.key: one.tokens for one in request.prepared.placed} for request in requests]
    waiting = deque(by_overlap(chunks))
    running: dict[Future[Delta], int] = {}
    last: dict[int, Delta] = {}
    try:
        while waiting or running:
            while waiting and len(running) < MOST_TOGETHER:
                index = waiting.popleft()
                running[start(requests[index]).future()] = index
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                index = running.pop(done)
                with suppress(OutOfMemoryError):
                    last[index] = result_of(done)
        ends = [last.get(index) or start(one).last() for index, one in enumerate(requests)]
    finally:
        for request in requests:
            request.cancel.set()
    return [cast(Generation, end.generation) for end in ends]
