"""Answers of one request, in turns with those of others, piece by piece; what is told of them."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, ClassVar

from cacheblend_rag.api.errors import ApiError
from cacheblend_rag.api.gate import Gate
from cacheblend_rag.api.wire import DONE, event
from cacheblend_rag.engines.answer import LEAST_LOGPROB, Delta, Generation, TokenLogprob
from cacheblend_rag.engines.prepare import PreparedPrompt
from cacheblend_rag.engines.sampling import SEED_LIMIT, SamplingParams
from cacheblend_rag.printable import one_line

if TYPE_CHECKING:
    from cacheblend_rag.engines.base import Engine
    from cacheblend_rag.rag.ordering import Source
    from cacheblend_rag.settings import BlendConfig

logger = logging.getLogger(__name__)


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


@dataclass(frozen=True)
class Piece:
    """The next piece of the choice ``index``; each prompt has ``n`` choices in a row.

    logprobs: those that no piece before has told of.
    """

    index: int
    delta: Delta
    logprobs: Sequence[TokenLogprob] = ()


@dataclass
class Log:
    """Logs one line for a request: no text, only what was reused and how long it took."""

    route: str
    started: float = field(default_factory=time.perf_counter)

    def done(self, answers: Sequence[Generation]) -> None:
        """Log an answered request."""
        reports = [answer.report for answer in answers]
        logger.info(
            "%s: %d prompt tokens, %d reused, %d recomputed%s; %d answered; first token %.2f s, "
            "all %.2f s",
            self.route,
            sum(report.prompt_tokens for report in reports),
            sum(report.reused_tokens for report in reports),
            sum(report.recomputed_tokens for report in reports),
            _why(reports[0].reason.code.value if reports and reports[0].reason else ""),
            sum(len(answer.token_ids) for answer in answers),
            max((report.seconds.time_to_first_token for report in reports), default=0.0),
            time.perf_counter() - self.started,
        )

    def failed(self, error: ApiError) -> None:
        """Log a request that was refused, or failed."""
        logger.info("%s: %d %s", self.route, error.status, error)


def _why(code: str) -> str:
    return f" ({code})" if code else ""


class Pieces:
    """The pieces of all answers, as they come; the work begins at once, and ends with ``aclose``.

    Attributes:
        answers: those that are finished, by index.
    """

    def __init__(self, engine: Engine, gate: Gate, asked: Asked) -> None:
        self.answers: dict[int, Generation] = {}
        self._engine, self._gate, self._asked = engine, gate, asked
        self._arrived: asyncio.Queue[Piece | Exception] = asyncio.Queue()
        self._first: Piece | None = None
        self._count = len(asked.prompts) * asked.n
        self._own = asyncio.Semaphore(gate.most_of_one)
        self._tasks = [asyncio.create_task(self._answer(at)) for at in range(self._count)]

    async def _answer(self, index: int) -> None:
        """Compute one answer, once it is its turn."""
        asked = self._asked
        prompt = asked.prompts[index // asked.n]
        try:
            async with self._own, self._gate.turn:
                settings = asked.settings(index)
                stream: Any = self._engine.astream(prompt, settings, config=asked.config)
                async with aclosing(stream) as deltas:
                    told = 0
                    async for delta in deltas:
                        new, answer = delta.logprobs, delta.generation
                        if answer is not None and answer.logprobs is not None:
                            new = answer.logprobs[told:]
                        told += len(new)
                        self._arrived.put_nowait(Piece(index, delta, new))
        except Exception as error:
            self._arrived.put_nowait(error)

    def __aiter__(self) -> Pieces:
        return self

    async def __anext__(self) -> Piece:
        """Return the next piece; raises what the engine raises, or ApiError when it closes."""
        if self._first is not None:
            first, self._first = self._first, None
            return first
        if len(self.answers) == self._count:
            raise StopAsyncIteration
        found = await self._arrived.get()
        if isinstance(found, Exception):
            raise found
        answer = found.delta.generation
        if answer is not None:
            if answer.finish_reason == "cancelled":
                raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, "the server is stopping")
            self.answers[found.index] = answer
        return found

    async def begin(self) -> None:
        """Wait for the first piece, so that an error before it can still become an HTTP status."""
        self._first = await anext(self)

    async def read(self) -> list[Generation]:
        """Read all pieces; return the finished answers, by the index of their choice."""
        async for _ in self:
            pass
        return self.in_order()

    def in_order(self) -> list[Generation]:
        """Return the finished answers in order."""
        return [self.answers[index] for index in sorted(self.answers)]

    async def aclose(self) -> None:
        """Stop all work that is not done."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def usage(answers: Sequence[Generation], n: int) -> dict[str, Any]:
    """Return the usage of a request; each prompt counts once, though it has ``n`` answers."""
    prompts = answers[::n]
    prompt = sum(answer.prompt_tokens for answer in prompts)
    completion = sum(len(answer.token_ids) for answer in answers)
    cached = sum(answer.report.reused_tokens for answer in prompts)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def extra_of(asked: Asked, answers: Sequence[Generation]) -> dict[str, Any]:
    """Return the field ``cacheblend``: the report of the first answer, and the sources if any."""
    report = answers[0].report.to_dict()
    if asked.sources is None:
        return {"report": report}
    return {"sources": [source.to_dict() for source in asked.sources], "report": report}


def sources_text(sources: Sequence[Source]) -> str:
    """Return a short list of documents for the end of an answer; "" without sources."""
    names = dict.fromkeys(one_line(source.chunk.document_id or "") for source in sources)
    listed = "".join(f"\n- {name}" for name in names if name)
    return f"\n\nSources:{listed}" if listed else ""


def chat_logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Return them as chat completions have them."""
    return {"content": response_logprobs(tokens), "refusal": None}


def response_logprobs(tokens: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """Return them as responses have them: a list of tokens."""
    return [one.to_openai() for one in tokens]


def completion_logprobs(tokens: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
    """Return them as completions have them; offset: where the first token's text begins."""
    told = [one.to_openai() for one in tokens]
    offsets = []
    for one in told:
        offsets.append(offset)
        offset += len(one["token"])
    return {
        "tokens": [one["token"] for one in told],
        "token_logprobs": [one["logprob"] for one in told],
        "top_logprobs": [
            {text: max(logprob, LEAST_LOGPROB) for _, text, logprob in one.top} for one in tokens
        ],
        "text_offset": offsets,
    }


@dataclass(kw_only=True)
class ChoicesForm(ABC):
    """The form of one answer.

    Args:
        model: the model's name for clients.
        n: choices for each prompt.
        usage_in_stream: whether a stream ends with the usage.
    """

    kind: ClassVar[str]
    """What ``object`` is in an answer."""
    chunk_kind: ClassVar[str]
    """And in a chunk of a stream."""
    id_prefix: ClassVar[str]
    prompt_field: ClassVar[str]

    model: str
    n: int
    usage_in_stream: bool
    id: str = field(init=False)
    created: int = field(default_factory=lambda: int(time.time()))

    def __post_init__(self) -> None:
        self.id = f"{self.id_prefix}-{uuid.uuid4().hex}"

    @abstractmethod
    def choice(self, asked: Asked, index: int, answer: Generation) -> dict[str, Any]:
        """Return a choice of a whole answer."""

    @abstractmethod
    def beginning(self, asked: Asked) -> list[bytes]:
        """Return the server-sent events that a stream begins with."""

    @abstractmethod
    def of_piece(self, asked: Asked, piece: Piece) -> list[bytes]:
        """Return the server-sent events for a piece of an answer."""

    def whole(self, asked: Asked, answers: Sequence[Generation]) -> dict[str, Any]:
        """Return the JSON body of a response that is not streamed."""
        return {
            **self._head(self.kind),
            "choices": [self.choice(asked, index, one) for index, one in enumerate(answers)],
            "usage": usage(answers, self.n),
            "cacheblend": extra_of(asked, answers),
        }

    async def events(self, asked: Asked, pieces: Pieces) -> AsyncGenerator[bytes, None]:
        """Yield the events of a streamed answer."""
        for sent in self.beginning(asked):
            yield sent
        async for piece in pieces:
            for sent in self.of_piece(asked, piece):
                yield sent
        if self.usage_in_stream:
            counted = usage(pieces.in_order(), self.n)
            yield event({**self._head(self.chunk_kind), "choices": [], "usage": counted})
        yield DONE

    def failure(self, error: ApiError) -> bytes:
        """Return the event for an error after the first one."""
        return event(error.body()) + DONE

    def chunk(self, choice: Mapping[str, Any], **extra: Any) -> bytes:
        """Return the event with a choice's next part."""
        told = {**self._head(self.chunk_kind), "choices": [choice], **extra}
        return event({**told, "usage": None} if self.usage_in_stream else told)

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}
