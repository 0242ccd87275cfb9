"""The answers of one request: what is asked, their pieces as they come, and their form as JSON."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, ClassVar, Self

from cacheblend_rag.api.gate import Gate
from cacheblend_rag.engines.answer import Delta, Generation
from cacheblend_rag.engines.prepare import PreparedPrompt
from cacheblend_rag.engines.sampling import SEED_LIMIT, SamplingParams
from cacheblend_rag.engines.vllm.refused import ApiError

if TYPE_CHECKING:
    from cacheblend_rag.engines.base import Engine
    from cacheblend_rag.rag.prompt import Source
    from cacheblend_rag.settings import BlendConfig


@dataclass(frozen=True)
class Asked:
    """What one request asks an engine.

    Args:
        prompts: they are answered each for itself.
        sampling: of all answers.
        n: answers to each prompt; with a seed, each has a seed of its own.
        config: how KV is blended; the engine's own for None.
        full: whether they are computed by ordinary prefill, without stored KV.
        sources: the passages that the server put into the prompt; None if it retrieved none.
        closing: what the text of each answer ends with, such as a list of its sources.
    """

    prompts: Sequence[PreparedPrompt]
    sampling: SamplingParams
    n: int = 1
    config: BlendConfig | None = None
    full: bool = False
    sources: Sequence[Source] | None = None
    closing: str = ""

    def salted(self, cache_salt: str | None) -> Asked:
        """Return the same with prompts whose prefixes are shared within a ``cache_salt`` only."""
        return replace(self, prompts=[replace(one, cache_salt=cache_salt) for one in self.prompts])

    def settings(self, index: int) -> SamplingParams:
        """Return the settings of an answer, by its index among all."""
        seed = self.sampling.seed
        if seed is None:
            return self.sampling
        own = (seed + index % self.n + SEED_LIMIT) % (2 * SEED_LIMIT) - SEED_LIMIT
        return self.sampling.with_changes(seed=own)

    def told(self, answer: Generation) -> dict[str, Any]:
        """Return the field ``cacheblend`` of what a client gets: report, and sources if any."""
        report = {"report": answer.report.to_dict()}
        if self.sources is None:
            return report
        return {"sources": [source.to_dict() for source in self.sources], **report}


class Answers:
    """The answers of a request, computed in turns with those of others while the block lasts.

    Iterating yields their pieces as they come, each with the index of its choice; each prompt has
    ``n`` choices in a row. It raises what the engine raises, and ApiError when that closes.
    """

    def __init__(self, engine: Engine, gate: Gate, asked: Asked) -> None:
        self.asked = asked
        self._engine, self._gate = engine, gate
        self._own = asyncio.Semaphore(gate.most_of_one)
        self._arrived: asyncio.Queue[tuple[int, Delta] | Exception] = asyncio.Queue()
        self._finished: dict[int, Generation] = {}
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def finished(self) -> list[Generation]:
        """The finished answers, in the order of their choices."""
        return [self._finished[index] for index in sorted(self._finished)]

    async def __aenter__(self) -> Self:
        count = len(self.asked.prompts) * self.asked.n
        self._tasks = [asyncio.create_task(self._answer(index)) for index in range(count)]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def __aiter__(self) -> AsyncIterator[tuple[int, Delta]]:
        while len(self._finished) < len(self._tasks):
            found = await self._arrived.get()
            if isinstance(found, Exception):
                raise found
            index, delta = found
            if (answer := delta.generation) is not None:
                if answer.finish_reason == "cancelled":
                    raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, "the server is stopping")
                self._finished[index] = answer
            yield index, delta

    async def _answer(self, index: int) -> None:
        """Compute one answer, once it is its turn."""
        asked, told = self.asked, 0
        prompt, settings = asked.prompts[index // asked.n], asked.settings(index)
        try:
            async with self._own, self._gate.turn:
                stream: Any = self._engine.astream(
                    prompt, settings, config=asked.config, full=asked.full
                )
                async with aclosing(stream) as deltas:
                    async for delta in deltas:
                        if delta.generation and delta.generation.logprobs:
                            delta = replace(delta, logprobs=delta.generation.logprobs[told:])
                        told += len(delta.logprobs)
                        self._arrived.put_nowait((index, delta))
        except Exception as error:
            self._arrived.put_nowait(error)


class Form(ABC):
    """Writes the answers of one request as JSON: whole, or as server-sent events.

    Args:
        asked: by the request.
        model: the model's name for clients.
    """

    id_prefix: ClassVar[str]

    def __init__(self, asked: Asked, model: str) -> None:
        self.asked, self.model = asked, model
        self.id = f"{self.id_prefix}{uuid.uuid4().hex}"
        self.created = int(time.time())

    @abstractmethod
    def whole(self, answers: Sequence[Generation]) -> dict[str, Any]:
        """Return the body of an answer that is not streamed."""

    @abstractmethod
    def beginning(self) -> list[bytes]:
        """Return the events before those of the first piece."""

    @abstractmethod
    def of_piece(self, index: int, delta: Delta) -> list[bytes]:
        """Return the events for the next piece of a choice."""

    @abstractmethod
    def ending(self, answers: Sequence[Generation]) -> list[bytes]:
        """Return the events after that of the last token."""

    @abstractmethod
    def failure(self, error: ApiError) -> list[bytes]:
        """Return the events that end a stream with an error."""


def event(plain: Any, name: str | None = None) -> bytes:
    """Return one server-sent event with JSON data; name: its type, if it has one."""
    text = json.dumps(plain, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {text}\n\n".encode()
