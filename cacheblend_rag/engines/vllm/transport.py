"""The interface of transports to a vLLM with the connector."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from cacheblend_rag.engines.answer import RawLogprob
from cacheblend_rag.engines.sampling import ResolvedSampling
from cacheblend_rag.engines.stream import BackgroundLoop, Cancellation
from cacheblend_rag.engines.vllm.protocol.job import NOTHING_FOUND, Ask, Job, Wish
from cacheblend_rag.engines.vllm.protocol.result import (
    ConnectorStatus,
    Failed,
    Result,
)
from cacheblend_rag.reason import Reason, ReasonCode

T = TypeVar("T")


@dataclass
class RequestCounts:
    """What became of requests, jobs included, since the transport was made.

    sent: how many were sent, each counted once. retried: how often one was sent again that was not
    answered.
    """

    sent: int = 0
    retried: int = 0


@dataclass(frozen=True)
class Piece:
    """A part of vLLM's answer.

    The last one has finish_reason, and ended_by: the string or the token
    that ended the answer, None for the end-of-sequence token; and params: the connector's result.
    decode_seconds: time after the first token, if vLLM reports it. logprobs: of its tokens, if they
    were asked for.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    ended_by: int | str | None = None
    params: Mapping[str, Any] | None = None
    decode_seconds: float | None = None
    logprobs: tuple[RawLogprob, ...] = ()


@dataclass(frozen=True)
class VLLMRequest:
    """A request to vLLM: token ids, sampling, what it wishes, and the cache salt.

    salt: requests with the same one, or none, share vLLM's prefix cache. replica: the engine
    behind the address that serves it; None is any. job: one for the connector, as JSON.
    request_id: the id that vLLM uses for it; with "" the transport chooses one. headers: further
    ones of HTTP; vLLM in process reads those of a trace.
    """

    token_ids: tuple[int, ...]
    sampling: ResolvedSampling
    salt: str | None = None
    wish: Wish = NOTHING_FOUND
    replica: int | None = None
    job: str | None = None
    request_id: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)


class Transport(ABC):
    """Sends requests to one vLLM, and returns its answers.

    Attributes:
        name: of engines over it, in reports. address: the argument of ``open_engine`` for such an
            engine.
        model_name: the model's name in vLLM. context_window: tokens of a prompt and its answer.
        background: the loop that all requests are made in.
        counts: of requests; of a server's only.
    """

    name: str
    address: str
    model_name: str
    context_window: int
    background: BackgroundLoop

    def __init__(self) -> None:
        self.counts = RequestCounts()

    @abstractmethod
    def send(self, request: VLLMRequest, *, stream: bool) -> AsyncIterator[Piece]:
        """Answer a request, piece by piece if ``stream``; closing the iterator aborts it."""

    @abstractmethod
    async def carry_out(self, job: Job) -> Result:
        """Have a job done, by each replica that must do it, and return the result."""

    def ask_status(self) -> ConnectorStatus:
        """Return the connector's status."""
        return status_of(self.run(self.carry_out(Ask(kind="status"))))

    @abstractmethod
    def load_tokenizer(self) -> Any:
        """Return the model's tokenizer; raises ModelLoadError."""

    @abstractmethod
    def generation_values(self) -> Mapping[str, Any]:
        """Return the fields of the model's generation_config, for a vLLM without the connector."""

    def check_tokenizer(self, tokenizer: Any) -> None:  # noqa: B027 - a server alone can differ
        """Raise ConfigError when vLLM tokenizes a text differently than ``tokenizer``."""

    @abstractmethod
    async def _stop(self) -> None:
        """Stop or disconnect from vLLM."""

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` in the background loop and return its result."""
        return self.background.run(work)

    def close(self) -> None:
        """Cancel running work and stop vLLM or the connection; may be called again."""
        self.background.close(self._stop)


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


def status_of(result: Result) -> ConnectorStatus:
    """Return the status that was asked for; any other answer is the reason for not blending."""
    match result:
        case ConnectorStatus() as status:
            return status
        case Failed(error=why) if why:
            return ConnectorStatus(False, why)
        case _:
            return ConnectorStatus(False, Reason(ReasonCode.NO_ANSWER, "no status came"))
