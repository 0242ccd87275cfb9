"""The answers of one request, computed in turns with those of others, piece by piece."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from cacheblend_rag.api.gate import Gate
from cacheblend_rag.engines.answer import Delta, Generation, TokenLogprob
from cacheblend_rag.engines.prepare import PreparedPrompt
from cacheblend_rag.engines.sampling import SEED_LIMIT, SamplingParams
from cacheblend_rag.engines.vllm.refused import ApiError
from cacheblend_rag.printable import one_line

if TYPE_CHECKING:
    from cacheblend_rag.engines.base import Engine
    from cacheblend_rag.rag.ordering import Source
    from cacheblend_rag.settings import BlendConfig


@dataclass(frozen=True)
class Asked:
    """What one request asks an engine.

    Args:
        prompts: they are answered each for itself.
        sampling: of all answers.
        n: answers to each prompt; with a seed, each has a seed of its own.
        config: how KV is blended; the engine's own for None.
        sources: the passages that the server put into the prompt; None if it retrieved none.
        closing: what the text of each answer ends with, such as a list of its sources.
    """

    prompts: Sequence[PreparedPrompt]
    sampling: SamplingParams
    n: int = 1
    config: BlendConfig | None = None
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
        return replace(self.sampling, seed=own)

    def told(self, answers: Sequence[Generation]) -> dict[str, Any]:
        """Return the field ``cacheblend`` of what a client gets: report, and sources if any."""
        report = {"report": answers[0].report.to_dict()}
        if self.sources is None:
            return report
        return {"sources": [source.to_dict() for source in self.sources], **report}


@dataclass(frozen=True)
class Piece:
    """The next piece of the choice ``index``; each prompt has ``n`` choices in a row.

    logprobs: those that no piece before has told of.
    """

    index: int
    delta: Delta
    logprobs: Sequence[TokenLogprob] = ()


class Answers:
    """The answers of a request; nothing is computed before their pieces are read."""

    def __init__(self, engine: Engine, gate: Gate, asked: Asked) -> None:
        self._engine, self._gate, self._asked = engine, gate, asked
        self._own = asyncio.Semaphore(gate.most_of_one)
        self._count = len(asked.prompts) * asked.n
        self._arrived: asyncio.Queue[Piece | Exception] = asyncio.Queue()
        self._finished: dict[int, Generation] = {}

    @property
    def finished(self) -> list[Generation]:
        """The finished answers, in the order of their choices."""
        return [self._finished[index] for index in sorted(self._finished)]

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """Yield the pieces of all answers, as they come; closing it stops all work.

        Raises what the engine raises, and ApiError when it closes.
        """
        tasks = [asyncio.create_task(self._answer(index)) for index in range(self._count)]
        try:
            while len(self._finished) < self._count:
                found = await self._arrived.get()
                if isinstance(found, Exception):
                    raise found
                if (answer := found.delta.generation) is not None:
                    if answer.finish_reason == "cancelled":
                        raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, "the server is stopping")
                    self._finished[found.index] = answer
                yield found
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _answer(self, index: int) -> None:
        """Compute one answer, once it is its turn."""
        asked, told = self._asked, 0
        prompt, settings = asked.prompts[index // asked.n], asked.settings(index)
        try:
            async with self._own, self._gate.turn:
                stream: Any = self._engine.astream(prompt, settings, config=asked.config)
                async with aclosing(stream) as deltas:
                    async for delta in deltas:
                        new, answer = delta.logprobs, delta.generation
                        if answer is not None and answer.logprobs is not None:
                            new = answer.logprobs[told:]
                        told += len(new)
                        self._arrived.put_nowait(Piece(index, delta, new))
        except Exception as error:
            self._arrived.put_nowait(error)


def sources_text(sources: Sequence[Source]) -> str:
    """Return a short list of documents for the end of an answer; "" without sources."""
    names = dict.fromkeys(one_line(source.chunk.document_id or "") for source in sources)
    listed = "".join(f"\n- {name}" for name in names if name)
    return f"\n\nSources:{listed}" if listed else ""
